"""Find the folders of runs, and read one: its metrics, and what its events say of every call of `train`."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tr_log.events_file import EVENTS_FILE, process_start

METRICS_FILE = "metrics.jsonl"
DEPTH = 3
"""Levels of folders below a path that are searched."""
SILENT_S = 600.0
"""Seconds without news after which a run on another machine counts as ended."""

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass
class Session:
    """One call of `train`, from its start to its end or to its last sign of life.

    Attributes:
        info: the event `start`: machine, versions, arguments.
        status: `finished`, `stopped`, `failed`, `killed` or `running`.
        end_s: time of its last event, seconds since 1970.
        step: the last step that it reached.
        times: `(time, step, seconds of each phase since the last one)`.
        marks: evaluations, checkpoints and warnings, as they are in the file.
        error: what ended it; empty without an error.
        rates: throughput at each log, as it is in the file.
    """

    info: dict[str, Any]
    status: str
    end_s: float
    step: int
    times: list[tuple[float, int, dict[str, float]]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    rates: list[dict[str, Any]] = field(default_factory=list)

    @property
    def start_s(self) -> float:
        """When it began, seconds since 1970."""
        return float(self.info["time_s"])

    @property
    def first_step(self) -> int:
        """The step that it began or resumed at."""
        return int(self.info["step"])


@dataclass
class RunFolder:
    """What the folder of a run says.

    Attributes:
        path: the folder.
        name: its name, for a legend.
        entries: log entries, each with its `step`.
        sessions: calls of `train`, in order; empty for a run without `events.jsonl`.
        unreadable: lines of the files that could not be read.
    """

    path: Path
    name: str
    entries: list[dict[str, Any]]
    sessions: list[Session]
    unreadable: int = 0

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Read a folder. A line that a running or killed process left half is skipped.

        Raises:
            FileNotFoundError: it holds neither metrics nor events.
            OSError: a file cannot be read.
        """
        metrics, bad_metrics = _lines(path / METRICS_FILE)
        events, bad_events = _lines(path / EVENTS_FILE)
        if not metrics and not events:
            raise FileNotFoundError(
                f"{path} is not the folder of a run: it has no entry in {METRICS_FILE} or {EVENTS_FILE}; give the "
                "output_dir of a run"
            )
        entries = [entry for entry in metrics if isinstance(entry.get("step"), int)]
        name = path.resolve().name
        return cls(path, name, [_numbers(entry) for entry in entries], _sessions(events), bad_metrics + bad_events)

    @property
    def status(self) -> str:
        """How the last session ended, or `running`; `unknown` without events."""
        return self.sessions[-1].status if self.sessions else "unknown"

    @property
    def step(self) -> int:
        """The last step that the run reached."""
        reached = [entry["step"] for entry in self.entries[-1:]] + [session.step for session in self.sessions[-1:]]
        return max(reached, default=0)

    @property
    def max_steps(self) -> int | None:
        """The steps that the run was to make; None if unknown."""
        return int(self.sessions[-1].info.get("max_steps") or 0) or None if self.sessions else None

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the last session."""
        known = dict(self.sessions[-1].info.get("arguments") or {}) if self.sessions else {}
        return {name: None if value == "None" else value for name, value in known.items()}

    @property
    def news_s(self) -> float:
        """When a file of the run last changed, seconds since 1970."""
        files = (self.path / METRICS_FILE, self.path / EVENTS_FILE)
        return max(file.stat().st_mtime for file in files if file.exists())

    @property
    def rates(self) -> list[dict[str, Any]]:
        """Throughput at each log, without that of steps that a later session made again."""
        kept: list[dict[str, Any]] = []
        for session in self.sessions:
            while kept and kept[-1]["step"] > session.first_step:
                kept.pop()
            kept += session.rates
        return kept

    def best(self) -> tuple[str, float, int] | None:
        """Return name, value and step of the best evaluation; None without one."""
        name = str(self.arguments.get("metric_for_best_model") or "eval_loss")
        name = name if name.startswith("eval_") else f"eval_{name}"
        known = [(e[name], e["step"]) for e in self.entries if isinstance(e.get(name), int | float)]
        known = [(value, step) for value, step in known if math.isfinite(value)]
        if not known:
            return None
        greater = self.arguments.get("greater_is_better")
        pick = max if greater or (greater is None and not name.endswith("loss")) else min
        value, step = pick(known, key=lambda pair: pair[0])
        return name, value, step

    def newest(self, name: str) -> float | None:
        """Return the last logged value of a name; None if it was never logged."""
        return next((entry[name] for entry in reversed(self.entries) if name in entry), None)


def _lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return [], 0
    objects, bad = [], 0
    for line in content.decode("utf-8", "replace").split("\n")[:-1]:
        try:
            item = json.loads(line)
        except (ValueError, RecursionError):
            item = None
        if isinstance(item, dict):
            objects.append(item)
        else:
            bad += 1
    return objects, bad


def _numbers(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: _NUMBERS.get(value, value) if isinstance(value, str) else value for name, value in entry.items()}


def _sessions(events: list[dict[str, Any]]) -> list[Session]:
    sessions: list[Session] = []
    for event in events:
        kind, when = event.get("event"), event.get("time_s")
        if not isinstance(when, int | float):
            continue
        if kind == "start":
            step = event.get("step")
            info = {**event, "step": step if isinstance(step, int) else 0}
            sessions.append(Session(info, "killed", float(when), info["step"]))
        if not sessions:
            continue
        _add(sessions[-1], str(kind), float(when), event)
    if sessions and sessions[-1].status == "killed" and _is_alive(sessions[-1]):
        sessions[-1].status = "running"
    return sessions


def _add(session: Session, kind: str, when: float, event: dict[str, Any]) -> None:
    session.end_s = max(session.end_s, when)
    if isinstance(step := event.get("step"), int):
        session.step = step
    if kind == "time":
        phases = event.get("phases")
        known = phases if isinstance(phases, dict) else {}
        session.times.append((when, session.step, {k: v for k, v in known.items() if isinstance(v, int | float)}))
    elif kind == "rates":
        if isinstance(step, int):
            session.rates.append(event)
    elif kind == "end":
        session.status, session.error = str(event.get("status", "finished")), str(event.get("error", ""))
    elif kind != "start":
        session.marks.append(event)


def _is_alive(session: Session) -> bool:
    pid = session.info.get("pid")
    if session.info.get("host") != socket.gethostname() or not isinstance(pid, int):
        return time.time() - session.end_s < SILENT_S
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it exists, and belongs to another user
        pass
    started = process_start(pid)  # another process may have got the number
    return started is None or session.info.get("pid_started") in (None, started)


def find_runs(paths: Iterable[Path]) -> list[RunFolder]:
    """Return the runs in these folders: a folder that is a run itself, or the runs below it, oldest first.

    Raises:
        FileNotFoundError: a path does not exist, or holds no run.
    """
    found: list[RunFolder] = []
    for path in paths:
        if not path.is_dir():
            raise FileNotFoundError(f"{path} is not a folder; give the output_dir of a run, or a folder of several")
        folders = [path] if _is_run(path) else sorted(_runs_below(path, DEPTH))
        runs = [run for folder in folders if (run := _read(folder)) is not None]
        if not runs:
            raise FileNotFoundError(
                f"{path} holds no run: no {METRICS_FILE} and no {EVENTS_FILE} with an entry, in it or up to {DEPTH} "
                "levels below; give the output_dir of a run, or a folder of several"
            )
        found += sorted(runs, key=lambda run: run.news_s) if len(runs) > 1 else runs
    return found


def _is_run(folder: Path) -> bool:
    return (folder / METRICS_FILE).is_file() or (folder / EVENTS_FILE).is_file()


def _runs_below(folder: Path, depth: int) -> list[Path]:
    below: list[Path] = []
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink() and not item.name.startswith((".", "checkpoint-")):
            below += [item] if _is_run(item) else _runs_below(item, depth - 1) if depth > 1 else []
    return below


def _read(folder: Path) -> RunFolder | None:
    try:
        return RunFolder.read(folder)
    except FileNotFoundError:  # files without an entry
        return None
