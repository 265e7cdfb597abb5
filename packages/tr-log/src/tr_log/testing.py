"""Reset what is logged once, and read metrics files as a resumed run does, in tests of what uses this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tr_log.csv_file import CsvFile
from tr_log.line_file import LineFile
from tr_log.loggers import _log_once
from tr_log.metrics_file import MetricsFile

__all__ = ["forget_once", "lines_of_resumed"]


def forget_once() -> None:
    """Let `info_once` and `warning_once` log again what they have logged."""
    _log_once.cache_clear()


def lines_of_resumed(
    sink: CsvFile | MetricsFile, path: Path, step: int, history: Sequence[Mapping[str, Any]]
) -> list[str] | None:
    """Return the lines that a metrics file would get when a run resumes; None if they stay as they are.

    Args:
        sink: reads the file.
        path: the file, which may hold anything; it is only read.
        step: the step of the checkpoint.
        history: the log entries of the checkpoint.
    """
    file = _Read(path)
    sink.wind_back(file, step, [dict(entry) for entry in history])
    return file.lines


class _Read(LineFile):
    """Keeps the lines that are to replace those of the file."""

    lines: list[str] | None = None

    def replace(self, lines: list[str]) -> None:
        self.lines = lines
