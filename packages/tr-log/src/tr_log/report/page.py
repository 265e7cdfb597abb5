"""Make the page of one or several runs: one HTML file that needs nothing else, no server and no network."""

from __future__ import annotations

import html
import json
import os
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tr_log import formatting
from tr_log.report.curves import Curve, curves, means, rate_curves, thin, words_of
from tr_log.report.run_folder import RunFolder, Session
from tr_log.report.run_table import run_names, run_table
from tr_log.report.time_split import PARTS, time_split, wall_time, words

MOST_NUMBERS = 25_000
"""Points of all curves of a page together: about 300 kB."""
MOST_POINTS_OF_A_CURVE, FEWEST_POINTS_OF_A_CURVE = 2_000, 30
MOST_MARKS, MOST_FILES = 400, 60
"""Marks of each kind of all sessions together, and files of a run."""
MOST_PAIRS = 2_000
"""Pairs of a step with its time, and with its epoch, of all runs together."""
MOST_DRAWN = 60_000
"""Characters of all matrices and tables of a page together."""
_KNOWN_OF_DRAWING = ("event", "time_s", "name")
MOST_WARNINGS, LONGEST_WARNING, MOST_PROFILES = 100, 400, 10
_COLUMNS = {
    "name": "operator",
    "calls": "calls",
    "cpu_ms": "CPU, ms",
    "device_ms": "device, ms",
    "share": "share",
}
MARKS = ("evaluation", "checkpoint", "updates")
UPDATES = {
    "skipped": "skipped: loss or gradient norm was not finite",
    "overflowed": "skipped: float16 overflowed",
    "nonfinite": "made by a loss or gradient norm that was not finite",
}
ORIGINS = {"call": "code", "assignment": "code, assigned later"}
"""Words for what arguments say of their origin; the others speak for themselves: `command line`, `file NAME`."""
_DIGITS = re.compile(r"(\d+)")


def page(runs: Sequence[RunFolder], *, place: Path | None = None, live: bool = False) -> str:
    """Return the page as text.

    Args:
        runs: the runs; the curves of several are laid over each other.
        place: the folder in which the page will lie, from which its links to files lead; without it there are no links.
        live: the page asks its server for newer data.
    """
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs" if runs else "no run yet"
    data = json.dumps(page_data(runs, place), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return _asset("page.html").format(
        title=html.escape(title),
        style=_asset("uplot.min.css") + _asset("page.css"),
        plotting=_asset("uplot.min.js"),
        script=_asset("page.js"),
        data=data.replace("<", "\\u003c"),  # no value can end the script element
        live="true" if live else "false",
    )


def page_data(runs: Sequence[RunFolder], place: Path | None = None) -> dict[str, Any]:
    """Return what the page shows, as values for JSON; see `page`."""
    found = [_curves_of(run) for run in runs]
    number = sum(map(len, found))
    most = min(max(MOST_NUMBERS // max(number, 1), FEWEST_POINTS_OF_A_CURVE), MOST_POINTS_OF_A_CURVE)
    names, sessions = run_names(runs), [session for run in runs for session in run.sessions]
    texts, marks = words(sessions), max(MOST_MARKS // max(len(sessions), 1), 4)
    columns, rows = run_table(runs) if len(runs) > 1 else ([], [[] for _ in runs])
    shared, arguments = _shared([_arguments(run) for run in runs])
    drawings = _drawings(runs)
    return {
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "runs": [
            _run(run, names[n], marks, max(MOST_PAIRS // len(runs), 30))
            | {"curves": {key: _drawn(curve, most) for key, curve in found[n].items()}, "objective": _drawn_small(run)}
            | {"row": rows[n], "arguments": arguments[n]}
            | {"files": _files(run.path, place), "profiles": _profiles(run, place)}
            | {"drawings": drawings[n]}
            for n, run in enumerate(runs)
        ],
        "columns": columns,
        "arguments": shared,
        "words": {name: words_of(name) for curves_of_run in found for name in curves_of_run},
        "parts": [{"key": part, "text": texts[part]} for part in PARTS],
    }


def _run(run: RunFolder, name: str, most_marks: int, most_pairs: int) -> dict[str, Any]:
    start_s = run.sessions[0].start_s if run.sessions else None
    last = run.sessions[-1] if run.sessions else None
    return {
        "name": name,
        "path": str(run.path.resolve()),
        "status": run.status,
        "error": last.error if last else "",
        "results": _results(run),
        "facts": _facts(run),
        "epochs": _ratio(
            [(e["step"], e["epoch"]) for e in run.entries if isinstance(e.get("epoch"), int | float)], most_pairs
        ),
        "times": _ratio(_elapsed(run.sessions), most_pairs),
        "sessions": [_session(session, start_s or 0.0, most_marks) for session in run.sessions],
        "wall": round(wall_time(run.sessions), 3),
        "split": {part: round(seconds, 3) for part, seconds in time_split(run.sessions).items()},
        "processes": _times_of_processes(last) if last else [],
        "warnings": _warnings(run, start_s or 0.0),
        "machine": _machine(last) if last else [],
    }


def _drawn_small(run: RunFolder) -> str:
    """Return the name of the curve that says how a run went: that of its evaluations, or the loss."""
    name = run.objective[0]
    return name if sum(name in entry for entry in run.entries) > 1 else "loss"


def _results(run: RunFolder) -> list[list[str]]:
    """Return the figures that a run is made for: the best evaluation, then those of its end."""
    best, results = run.best(), run.results()
    rows = [] if best is None else [[f"best {words_of(best[0])[0]}", formatting.value(best[1]), f"at step {best[2]}"]]
    rows += [[words_of(name)[0], formatting.value(value), ""] for name, value in results.items()]
    if (loss := run.newest("loss")) is not None:
        rows.append([words_of("loss")[0], formatting.value(loss), ""])
    return rows


def _facts(run: RunFolder) -> list[list[str]]:
    facts = [["steps", formatting.position(run.step, run.max_steps)]]
    if run.sessions:
        began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.sessions[0].start_s))
        facts += [["started", began], ["wall time", formatting.duration(wall_time(run.sessions))]]
        if len(run.sessions) > 1:
            facts.append(["restarts", str(len(run.sessions) - 1)])
        facts += _circumstances(run.sessions[-1])
    if run.unreadable:
        facts.append(["unreadable lines", str(run.unreadable)])
    return facts


def _circumstances(session: Session) -> list[list[str]]:
    """Return what was trained, on what, where, and by which command, as far as the run's files say it."""
    info = session.info
    model, hardware = (info[key] if isinstance(info.get(key), dict) else {} for key in ("model", "hardware"))
    counts = [model.get(key) for key in ("parameters", "trained")]
    evaluated = [m["samples"] for m in session.marks if m.get("event") == "evaluation" and m.get("samples")]
    samples = [(info.get("train_samples"), "to train on"), (evaluated[-1] if evaluated else None, "to evaluate on")]
    devices = hardware.get("devices") or []
    cores = f"{hardware['cores']} cores" if hardware.get("cores") else ""
    rows = {
        "model": str(model.get("class") or ""),
        "parameters": f"{counts[0]:,}" if isinstance(counts[0], int) else "",
        "trained": f"{counts[1]:,} parameters" if isinstance(counts[1], int) and counts[1] != counts[0] else "",
        "samples": ", ".join(f"{n:,} {use}" for n, use in samples if isinstance(n, int)),
        "GPU": ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices)),
        "processor": ", ".join(text for text in (str(hardware.get("cpu") or ""), cores) if text),
        "processes": _processes(info) if info.get("world_size", 1) != 1 else "",
        "commit": _commit(info),
        "weights from": str(model.get("source") or ""),
        "command": str(info.get("command") or ""),
    }
    return [[name, text] for name, text in rows.items() if text]


def _commit(info: Mapping[str, Any]) -> str:
    """Return the commit, and how many files differ from it as far as that is known."""
    commit, modified = str(info.get("commit") or "")[:12], info.get("modified")
    if not commit or not isinstance(modified, int):
        return commit
    return f"{commit}, " + (f"{modified} {'files' if modified > 1 else 'file'} modified" if modified else "clean")


def _elapsed(sessions: Sequence[Session]) -> list[tuple[float, float]]:
    """Return steps and the seconds since the first start at which they were reached for good.

    A session begins a thousandth behind its first step: that step itself was reached by the one before.
    """
    pairs: list[tuple[float, float]] = []
    for session in sessions:
        while pairs and pairs[-1][0] > session.first_step:
            pairs.pop()
        began_s = next((when for when, step, _ in session.times if step == session.first_step), session.start_s)
        pairs.append((session.first_step + (0.001 if pairs else 0), began_s - sessions[0].start_s))
        pairs += [(step, when - sessions[0].start_s) for when, step, _ in session.times if step > pairs[-1][0]]
    return pairs


def _pace(sessions: Sequence[Session]) -> Curve | None:
    """Return the curve of steps per second, of about a hundred parts of each session; None without one."""
    steps: list[int] = []
    paces: list[float | None] = []
    for session in sessions:
        stride = max(len(session.times) // 100, 1)
        times = session.times[::stride]
        for (earlier, first, _), (later, last, _) in pairwise(times):
            if last > first and later > earlier:
                steps.append(last)
                paces.append((last - first) / (later - earlier))
    return (steps, paces) if len(steps) > 1 else None


def _ratio(pairs: Sequence[tuple[float, float]], most: int) -> list[list[float]]:
    """Return few of the pairs; between them a page interpolates."""
    stride = max(len(pairs) // min(most, 300), 1)
    few = list(pairs[::stride])
    if pairs and few[-1] != pairs[-1]:
        few.append(pairs[-1])
    return [[step, round(float(value), 4)] for step, value in few]


def _session(session: Session, start_s: float, most_marks: int) -> dict[str, Any]:
    return {
        "from": round(session.start_s - start_s, 3),
        "to": round(session.end_s - start_s, 3),
        "first": session.first_step,
        "last": session.step,
        "status": session.status,
        "marks": [
            [kind, round(mark["time_s"] - start_s, 3), mark.get("step"), _said(mark)]
            for kind in MARKS
            for mark in _few([mark for mark in session.marks if mark.get("event") == kind], most_marks)
        ],
    }


def _few(marks: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    stride = -(-len(marks) // most) or 1
    return marks[::-1][::stride][::-1]  # the last one among them


def _said(mark: dict[str, Any]) -> str:
    """Return what an event `updates` says: `2 skipped, 1 not finite`."""
    return ", ".join(f"{mark[name]} {text}" for name, text in UPDATES.items() if isinstance(mark.get(name), int))


def _arguments(run: RunFolder) -> list[list[Any]]:
    """Return name, value and origin of each argument; the origin is empty for one at its default."""
    if not run.sessions:
        return []
    info = run.sessions[-1].info
    changed, origins = set(info.get("changed") or ()), info.get("origins")
    rows = []
    for name, value in run.arguments.items():
        if isinstance(origins, dict):
            origin = str(origins.get(name, ""))
            text = ORIGINS.get(origin, origin) or ("follows from others" if name in changed else "")
        else:
            text = "set" if name in changed else ""
        rows.append([name, value, text])
    return rows


def _shared(arguments: Sequence[list[list[Any]]]) -> tuple[list[list[Any]], list[list[list[Any]]]]:
    """Divide the arguments of several runs: what all have alike, and what is each run's own."""
    if len(arguments) < 2:
        return [], list(arguments)
    alike = set.intersection(*({repr(row) for row in rows} for rows in arguments))
    own = [[row for row in rows if repr(row) not in alike] for rows in arguments]
    return [row for row in arguments[0] if repr(row) in alike], own


def _warnings(run: RunFolder, start_s: float) -> list[list[Any]]:
    """Return when a warning first came, how often, its level and text; warnings that differ in numbers count as one."""
    rows: dict[tuple[str, str], list[Any]] = {}
    for session in run.sessions:
        for mark in session.marks:
            if mark.get("event") == "warning":
                level, text = str(mark.get("level", "WARNING")), str(mark.get("text", ""))[:LONGEST_WARNING]
                row = rows.setdefault(
                    (level, _DIGITS.sub("0", text)), [formatting.duration(mark["time_s"] - start_s), 0, level, text]
                )
                row[1] += 1
    return list(rows.values())[:MOST_WARNINGS]


def _processes(info: Mapping[str, Any]) -> str:
    """Return the number of processes, and the sizes that they were spread by, as they were given."""
    sizes = info.get("arguments", {}).get("parallelism_config")
    return str(info.get("world_size", 1)) + (f" ({sizes})" if sizes else "")


def _times_of_processes(session: Session) -> list[dict[str, Any]]:
    """Return the name of each process and its seconds by part."""
    return [
        {"name": f"{rank} ({place})" if place else str(rank), "split": phases}
        for rank, (place, phases) in enumerate(session.processes)
    ]


def _machine(session: Session) -> list[list[str]]:
    hardware, versions = session.info.get("hardware") or {}, session.info.get("versions") or {}
    rows = [["host", str(session.info.get("host", ""))], ["processes", _processes(session.info)]]
    rows += [[str(key), ", ".join(map(str, v)) if isinstance(v, list) else str(v)] for key, v in hardware.items()]
    rows += [[str(key), str(value)] for key, value in versions.items()]
    return [*rows, ["script", str(session.info.get("script", ""))]]


def _files(folder: Path, place: Path | None) -> list[list[str]]:
    """Return the names of the run's files, each with its address."""
    try:
        names = [item.name + ("/" if item.is_dir() else "") for item in folder.iterdir() if item.name[0] != "."]
    except OSError:
        return []
    names.sort(key=lambda name: [part.zfill(12) if part.isdecimal() else part for part in _DIGITS.split(name)])
    rows = [[name, _address(folder, name, place)] for name in names]
    half = MOST_FILES // 2
    return rows if len(rows) <= MOST_FILES else [*rows[:half], [f"... {len(rows) - 2 * half} more", ""], *rows[-half:]]


def _address(folder: Path, name: str, place: Path | None) -> str:
    """Return the address of a file in a run's folder for a page that lies in `place`; empty if it is not a file.

    It is relative only if the page lies in the folder itself: then both can be moved together.
    """
    if place is None:
        return ""
    start = "./" if folder.resolve() == place.resolve() else folder.resolve().as_uri() + "/"
    return start + quote(os.fsencode(name))


def _profiles(run: RunFolder, place: Path | None) -> list[dict[str, Any]]:
    """Return of each recording of some steps: the steps, the dearest operators, and its files with their addresses."""
    marks = [mark for session in run.sessions for mark in session.marks if mark.get("event") == "profile"]
    made = []
    for mark in marks[-MOST_PROFILES:]:
        first, last, found = mark.get("first"), mark.get("last"), mark.get("operators")
        operators = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
        has_device = any(row.get("device_ms") for row in operators)
        columns = ["name", "share", "calls", "cpu_ms", *(["device_ms"] if has_device else [])]
        files = [str(mark[kind]) for kind in ("trace", "memory") if mark.get(kind)]
        made.append(
            {
                "steps": f"step {first}" if first == last else f"steps {first} to {last}",
                "heads": [_COLUMNS[name] for name in columns],
                "rows": [[_cell(name, row.get(name)) for name in columns] for row in operators],
                "files": [[name, _address(run.path, name, place)] for name in files],
            }
        )
    return made


def _drawings(runs: Sequence[RunFolder]) -> list[list[dict[str, Any]]]:
    """Return of each run its matrices and tables by name, the newest first; older ones while there is room."""
    found: list[dict[str, list[dict[str, Any]]]] = [{} for _ in runs]
    by_age: list[tuple[int, int, str, dict[str, Any]]] = []
    for number, run in enumerate(runs):
        ages: Counter[str] = Counter()
        for drawing in reversed(run.drawings):
            name = str(drawing.get("name"))
            by_age.append((ages[name], number, name, drawing))
            found[number][name] = []
            ages[name] += 1
    room = MOST_DRAWN
    for _, number, name, drawing in sorted(by_age, key=lambda each: each[0]):
        if (room := room - len(json.dumps(drawing))) < 0:
            break
        found[number][name].append({key: value for key, value in drawing.items() if key not in _KNOWN_OF_DRAWING})
    return [
        [{"title": words_of(name)[0], "drawn": drawn} for name, drawn in sorted(of_run.items())] for of_run in found
    ]


def _cell(column: str, value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    return f"{100 * value:.1f} %" if column == "share" else str(value) if column == "calls" else f"{value:.2f}"


def _asset(name: str) -> str:
    return (files("tr_log.report") / "assets" / name).read_text("utf-8")


def _curves_of(run: RunFolder) -> dict[str, Curve]:
    found = curves(run.entries) | rate_curves(run.rates)
    if not run.rates and (pace := _pace(run.sessions)) is not None:
        found["steps_per_second"] = pace
    return found


def _drawn(curve: Curve, most_points: int) -> dict[str, Any]:
    """Return at most so many points of a curve, and means of neighbours if that is not all of it."""
    x, y = thin(*curve, most_points)
    made = {"x": x, "y": y}
    return made if len(curve[0]) <= most_points else made | {"mean": means(*curve, most_points // 5)}
