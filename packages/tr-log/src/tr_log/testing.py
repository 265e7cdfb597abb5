"""Write the files of a run, read metrics files as a resumed run does, and reset what is logged once, for tests."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tr_log.events_file import process_start
from tr_log.line_file import LineFile
from tr_log.loggers import _log_once
from tr_log.metrics_file import MetricsFile

__all__ = [
    "ALIVE",
    "KILLED_ONCE",
    "checkpoint_event",
    "end_event",
    "forget_once",
    "lines_of_resumed",
    "start_event",
    "time_event",
    "write_run",
]

ALIVE = {"pid": os.getpid(), "host": socket.gethostname(), "pid_started": process_start(os.getpid())}
"""What the event `start` of a run in this process says of it."""


def forget_once() -> None:
    """Let `info_once` and `warning_once` log again what they have logged."""
    _log_once.cache_clear()


def lines_of_resumed(path: Path, step: int, history: Sequence[Mapping[str, Any]]) -> list[str] | None:
    """Return the lines that a metrics file would get when a run resumes; None if they stay as they are.

    Args:
        path: the file, which may hold anything; it is only read.
        step: the step of the checkpoint.
        history: the log entries of the checkpoint.
    """
    file = _Read(path)
    MetricsFile().wind_back(file, step, [dict(entry) for entry in history])
    return file.lines


class _Read(LineFile):
    """Keeps the lines that are to replace those of the file."""

    lines: list[str] | None = None

    def replace(self, lines: list[str]) -> None:
        self.lines = lines


def start_event(time_s: float, step: int = 0, **more: Any) -> dict[str, Any]:
    """Return an event `start`, of 100 steps, on another machine."""
    return {"event": "start", "time_s": time_s, "step": step, "max_steps": 100, "host": "elsewhere", **more}


def time_event(time_s: float, step: int, **phases: float) -> dict[str, Any]:
    """Return an event `time` with the seconds of each phase."""
    return {"event": "time", "time_s": time_s, "step": step, "phases": phases}


def checkpoint_event(time_s: float, step: int) -> dict[str, Any]:
    """Return an event `checkpoint`."""
    return {"event": "checkpoint", "time_s": time_s, "step": step}


def end_event(time_s: float, step: int, status: str = "finished", **more: Any) -> dict[str, Any]:
    """Return an event `end`."""
    return {"event": "end", "time_s": time_s, "step": step, "status": status, **more}


def write_run(
    folder: Path, events: Sequence[Mapping[str, Any]] = (), entries: Sequence[Mapping[str, Any]] = ()
) -> Path:
    """Write the files of a run, and return its folder.

    Args:
        folder: where; it is created.
        events: of `events.jsonl`.
        entries: of `metrics.jsonl`, each with its `step`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, items in (("events.jsonl", events), ("metrics.jsonl", entries)):
        if items:
            (folder / name).write_text("".join(json.dumps(item) + "\n" for item in items), "utf-8")
    return folder


KILLED_ONCE = [
    start_event(1000.0),
    time_event(1002.0, 0, start=2.0),
    time_event(1010.0, 50, compute=6.0, data=2.0),
    checkpoint_event(1010.0, 50),
    time_event(1013.0, 60, compute=3.0),
    start_event(1020.0, 50),
    time_event(1021.0, 50, start=1.0),
    time_event(1031.0, 100, compute=8.0, evaluation=1.0, checkpoint=1.0),
    end_event(1031.0, 100),
]
"""Events of a run that was killed after step 60, resumed from step 50, and finished."""
