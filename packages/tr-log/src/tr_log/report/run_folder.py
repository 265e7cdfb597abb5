"""Find the folders of runs, and read one: its metrics, and what its events say of every call of `train`."""

from __future__ import annotations

import math
import os
import socket
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tr_log.events_file import EVENTS_FILE, process_start
from tr_log.formatting import TIMINGS
from tr_log.line_file import LineFile
from tr_log.report.curves import OF

METRICS_FILE = "metrics.jsonl"
DEPTH = 3
"""Levels of folders below a path that are searched."""
SILENT_S = 600.0
"""Seconds without news after which a run on another machine counts as killed, unless it was silent for long before."""

_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass
class Session:
    """One call of `train`, from its start to its end or to its last sign of life.

    Attributes:
        info: the event `start`: machine, versions, arguments.
        end_s: time of its last event, seconds since 1970.
        step: the last step that it reached.
        times: `(time, step, seconds of each phase since the last one)`.
        marks: evaluations, checkpoints and warnings, as they are in the file.
        ended: how it said that it ended: `finished`, `stopped` or `failed`; empty if it did not.
        error: what ended it; empty without an error.
        rates: throughput at each log, as it is in the file, and how busy the machine was.
        predictions: the metrics of each prediction, also of those after its end.
        drawings: matrices and tables, also of those after its end.
        processes: of several, the place in a mesh and the seconds of each phase, by rank; empty if the run was killed.
        measures_exchange: whether the time of exchanging gradients is that of exchange; else it is part of computing.
        is_last: no later one began.
        longest_silence_s: seconds between two events, at most.
    """

    info: dict[str, Any]
    end_s: float
    step: int
    times: list[tuple[float, int, dict[str, float]]] = field(default_factory=list)
    marks: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""
    error: str = ""
    rates: list[dict[str, Any]] = field(default_factory=list)
    predictions: list[dict[str, Any]] = field(default_factory=list)
    drawings: list[dict[str, Any]] = field(default_factory=list)
    processes: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    measures_exchange: bool = False
    is_last: bool = True
    longest_silence_s: float = 0.0

    @property
    def status(self) -> str:
        """How it ended, or `killed` if it did not say so, or `running`; of one on another machine, a guess."""
        return self.ended or ("running" if self.is_last and _is_alive(self) else "killed")

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
        news_s: when a file of the run last changed, seconds since 1970.
    """

    path: Path
    name: str
    entries: list[dict[str, Any]]
    sessions: list[Session]
    unreadable: int = 0
    news_s: float = 0.0

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Read a folder. A line that a running or killed process left half is skipped.

        Raises:
            FileNotFoundError: it holds neither metrics nor events.
            OSError: a file cannot be read.
        """
        news_s = max((seen[1] for seen in files_of(path)), default=0) / 1e9
        lines = {name: LineFile(path / name).read_objects() for name in (METRICS_FILE, EVENTS_FILE)}
        metrics, events = ([item for item in found if item is not None] for found in lines.values())
        if not metrics and not events:
            raise FileNotFoundError(
                f"{path} is not the folder of a run: it has no entry in {METRICS_FILE} or {EVENTS_FILE}; give the "
                "output_dir of a run"
            )
        entries = [entry for entry in metrics if isinstance(entry.get("step"), int)]
        numbers = [_numbers(entry) for entry in entries]
        unreadable = sum(found.count(None) for found in lines.values())
        return cls(path, path.resolve().name, numbers, _sessions(events), unreadable, news_s)

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
    def start_s(self) -> float:
        """When it began, or if that is not known, when it last changed; seconds since 1970."""
        return self.sessions[0].start_s if self.sessions else self.news_s

    @property
    def rates(self) -> list[dict[str, Any]]:
        """Throughput at each log, and load, without those of steps that a later session made again."""
        return self._kept(lambda session: session.rates)

    @property
    def drawings(self) -> list[dict[str, Any]]:
        """Matrices and tables, without those of steps that a later session made again."""
        return self._kept(lambda session: session.drawings)

    def _kept(self, of: Callable[[Session], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        kept: list[dict[str, Any]] = []
        for session in self.sessions:
            while kept and kept[-1]["step"] > session.first_step:
                kept.pop()
            kept += of(session)
        return kept

    @property
    def objective(self) -> tuple[str, bool]:
        """The metric by which evaluations are compared, and whether a greater one is better."""
        name = str(self.arguments.get("metric_for_best_model") or "eval_loss")
        name = name if name.startswith("eval_") else f"eval_{name}"
        greater = self.arguments.get("greater_is_better")
        return name, bool(greater) if greater is not None else not name.endswith("loss")

    def best(self) -> tuple[str, float, int] | None:
        """Return name, value and step of the best evaluation; None without one."""
        name, greater = self.objective
        known = [(e[name], e["step"]) for e in self.entries if isinstance(e.get(name), int | float)]
        known = [(value, step) for value, step in known if math.isfinite(value)]
        if not known:
            return None
        value, step = (max if greater else min)(known, key=lambda pair: pair[0])
        return name, value, step

    def results(self) -> dict[str, float]:
        """Return the metrics of the last evaluation and prediction of each name, without their timings."""
        numbers: dict[str, float] = {}
        for entry in self.entries:
            numbers |= entry
        numbers = {name: value for name, value in numbers.items() if name.startswith(tuple(OF))}
        for made in (made for session in self.sessions for made in session.predictions):
            numbers |= made
        return {
            name: value
            for name, value in numbers.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and not name.endswith(TIMINGS)
        }

    def newest(self, name: str) -> float | None:
        """Return the last logged value of a name; None if it was never logged."""
        return next((entry[name] for entry in reversed(self.entries) if name in entry), None)


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
            for earlier in sessions:
                earlier.is_last = False
            sessions.append(Session(info, float(when), info["step"]))
        if not sessions:
            continue
        _add(sessions[-1], str(kind), float(when), event)
    return sessions


def _add(session: Session, kind: str, when: float, event: dict[str, Any]) -> None:
    if kind == "prediction":  # often after the end
        metrics = event.get("metrics")
        session.predictions += [_numbers(metrics)] if isinstance(metrics, dict) else []
        return
    if kind == "drawing":
        session.drawings += [event] if isinstance(event.get("step"), int) else []
        return
    session.longest_silence_s = max(session.longest_silence_s, when - session.end_s)
    session.end_s = max(session.end_s, when)
    if isinstance(step := event.get("step"), int):
        session.step = step
    if kind == "time":
        session.measures_exchange |= event.get("measures_exchange") is True
        session.times.append((when, session.step, _phases(event)))
        if isinstance(load := event.get("load"), dict):
            session.rates.append({**load, "step": session.step})
    elif kind == "rates":
        session.rates += [event] if isinstance(step, int) else []
    elif kind == "processes":
        session.processes = _processes(event)
    elif kind == "end":
        session.ended, session.error = str(event.get("status", "finished")), str(event.get("error", ""))
    elif kind != "start":
        session.marks.append(event)


def _processes(event: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    rows = event.get("processes")
    known = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [(str(row.get("place", "")), _phases(row)) for row in known]


def _phases(event: dict[str, Any]) -> dict[str, float]:
    phases = event.get("phases")
    known = phases if isinstance(phases, dict) else {}
    return {name: value for name, value in known.items() if isinstance(value, int | float)}


def _is_alive(session: Session) -> bool:
    pid = session.info.get("pid")
    if session.info.get("host") != socket.gethostname() or not isinstance(pid, int):
        # Its clock may be ahead of this one, but not by so much.
        return abs(time.time() - session.end_s) < max(SILENT_S, 3 * session.longest_silence_s)
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
        OSError: a folder or a file of a run cannot be read.
    """
    found: list[RunFolder] = []
    for path in paths:
        runs = read_runs(run_folders(path))
        if not runs:
            raise FileNotFoundError(
                f"{path} holds no run: no {METRICS_FILE} and no {EVENTS_FILE} with an entry, in it or up to {DEPTH} "
                "levels below; give the output_dir of a run, or a folder of several"
            )
        found += runs
    return found


def run_folders(path: Path) -> list[Path]:
    """Return a folder itself if it is that of a run, else those of runs below it.

    Raises:
        FileNotFoundError: it does not exist.
        OSError: it cannot be read.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder; give the output_dir of a run, or a folder of several")
    return [path] if files_of(path) else sorted(_runs_below(path, DEPTH))


def read_runs(folders: Iterable[Path]) -> list[RunFolder]:
    """Return the runs in these folders that have an entry, oldest first.

    Raises:
        OSError: a file of a run cannot be read.
    """
    runs = []
    for folder in folders:
        try:
            runs.append(RunFolder.read(folder))
        except FileNotFoundError:  # files without an entry, or removed meanwhile
            continue
    return sorted(runs, key=lambda run: run.start_s)


def files_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, time of the last change in nanoseconds, and size of the files of a run that there are."""
    found = []
    for name in (METRICS_FILE, EVENTS_FILE):
        try:
            seen = (folder / name).stat()
        except OSError:
            continue
        if stat.S_ISREG(seen.st_mode):
            found.append((name, seen.st_mtime_ns, seen.st_size))
    return found


def _runs_below(folder: Path, depth: int) -> list[Path]:
    below: list[Path] = []
    for item in folder.iterdir():
        if item.is_dir() and not item.is_symlink() and not item.name.startswith((".", "checkpoint-")):
            if files_of(item):
                below.append(item)
            elif depth > 1:
                with suppress(OSError):  # it cannot be read, or was removed meanwhile
                    below += _runs_below(item, depth - 1)
    return below
