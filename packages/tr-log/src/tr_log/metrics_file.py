"""Write every log entry of a run to `metrics.jsonl` in its output folder."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

from tr_log.formatting import to_json
from tr_log.line_file import LineFile
from tr_log.loggers import get_logger
from tr_log.run_file import Entry, RunFile, entries_until

logger = get_logger(__name__)


class MetricsFile(RunFile):
    """A trainer callback that writes one strict-JSON object a line for each log entry, on the main process.

    An object is `{"step": 10, ...}` with the entry's own names after it. A number that JSON cannot hold is the string
    `"NaN"`, `"Infinity"` or `"-Infinity"`. `RunFile` describes what a new run or a resume does.

    Args:
        name: the file's name in the output folder.
        with_time: add `time_s`, the seconds since 1970, after the step. By default off, because it makes equal runs
            differ in every line.
    """

    def __init__(self, name: str = "metrics.jsonl", *, with_time: bool = False) -> None:
        super().__init__(name)
        self.with_time = with_time

    @classmethod
    def from_arguments(cls, args: Any) -> MetricsFile:
        """Return one for a trainer with these arguments; `output_dir` is read when it is needed."""
        return cls()

    @classmethod
    def timed(cls, args: Any) -> MetricsFile:
        """Return one that adds the time and writes `metrics-timed.jsonl`, beside the file of every run."""
        return cls("metrics-timed.jsonl", with_time=True)

    def append(self, file: LineFile, entry: dict[str, Any]) -> None:
        """Add one line."""
        when = {"time_s": round(time.time(), 3)} if self.with_time else {}
        file.append(to_json({"step": entry["step"]} | when | entry))

    def wind_back(self, file: LineFile, step: int, history: Sequence[Entry]) -> tuple[int, int]:
        """Keep the lines that were logged before the checkpoint of `step`."""
        lines = file.read()
        decoded = [_decoded(line) for line in lines]
        unreadable = decoded.count(None)
        if unreadable:
            logger.warning("%s: %d of %d lines are not readable and are dropped", file.path, unreadable, len(lines))
        kept = [to_json(entry) for entry in entries_until([e for e in decoded if e is not None], step, history)]
        if kept != lines:
            file.replace(kept)
        return len(kept), len(lines)


def _decoded(line: str) -> Entry | None:
    try:
        entry = json.loads(line)
        return entry if isinstance(entry["step"], int) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
