"""Write every log entry of a run to `metrics.jsonl` in its output folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tr_log.formatting import to_json
from tr_log.line_file import LineFile
from tr_log.loggers import get_logger
from tr_log.tracker import EveryEvent

logger = get_logger(__name__)

Entry = Mapping[str, Any]


class MetricsFile(EveryEvent):
    """A trainer callback that writes one strict-JSON object a line for each log entry, on the main process.

    An object is `{"step": 10, ...}` with the entry's own names after it. A number that JSON cannot hold is the string
    `"NaN"`, `"Infinity"` or `"-Infinity"`.

    A resumed run leaves the same file as a run that never stopped, so entries after the resumed step are dropped. A new
    run in the same folder keeps the old file as `NAME-1.EXT` and so on. A resumed run without steps left changes the
    file only when it logs something, such as a pending evaluation.

    Args:
        name: the file's name in the output folder.
        with_time: add `time_s`, the seconds since 1970, after the step. By default off, because it makes equal runs
            differ in every line.
    """

    def __init__(self, name: str = "metrics.jsonl", *, with_time: bool = False) -> None:
        self.name, self.with_time = name, with_time
        self._file: LineFile | None = None
        self._given: Path | None = None
        self._is_new = False
        self._reached: tuple[int, Sequence[Entry]] | None = None

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
        """Keep the lines that were logged before the checkpoint of `step`.

        Returns:
            The number of lines left, and the number before.

        Raises:
            OSError: the file could not be read.
        """
        lines = file.read()
        entries = [entry for entry in file.read_objects() if entry and isinstance(entry.get("step"), int)]
        if unreadable := len(lines) - len(entries):
            logger.warning("%s: %d of %d lines are not readable and are dropped", file.path, unreadable, len(lines))
        kept = [to_json(entry) for entry in _until(entries, step, history)]
        if kept != lines:
            file.replace(kept)
        return len(kept), len(lines)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Rename the file of an earlier run, or rewind it to the resumed step."""
        if not state.is_world_process_zero:
            return
        file = self._file_in(args)
        if state.global_step == 0:
            try:
                self._start(file)
            except OSError as error:
                file.report(error)
        elif 0 < state.max_steps <= state.global_step:
            self._reached = (state.global_step, list(state.log_history))
        else:
            self._resume(file, state.global_step, state.log_history)
        self._is_new = False

    def on_log(self, args: Any, state: Any, control: Any, logs: Entry | None = None, **kwargs: Any) -> None:
        """Append the entry."""
        if logs and state.is_world_process_zero:
            entry = {name: logs[name] for name in logs if name != "step"}
            file = self._file_in(args)
            if (reached := self._reached) is not None:
                self._reached = None
                self._resume(file, *reached)
            self.append(file, {"step": state.global_step} | entry)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Try again to write the entries that could not be written before."""
        self._reached = None
        if self._file is not None:
            self._file.close()

    def _file_in(self, args: Any) -> LineFile:
        path = Path(args.output_dir) / self.name
        if self._file is None or self._given != path:
            # Absolute, because a relative folder means another one after os.chdir.
            self._given, self._file = path, LineFile(path.absolute())
            self._is_new = not self._file.path.exists()
        return self._file

    def _start(self, file: LineFile) -> None:
        # An evaluation before the training is part of the run. Then the file is already this run's own.
        if self._is_new:
            return
        aside = file.set_aside()
        if aside is not None:
            logger.info("what an earlier run in this folder logged is kept as %s", aside)

    def _resume(self, file: LineFile, step: int, history: Sequence[Entry]) -> None:
        try:
            left, before = self.wind_back(file, step, history)
        except OSError as error:
            file.report(error)
            return
        if left != before:
            logger.info(
                "%s goes on from step %d: %d entries instead of %d",
                file.path,
                step,
                left,
                before,
            )


def _until(entries: Sequence[Entry], step: int, history: Sequence[Entry]) -> list[Entry]:
    """Return the entries that were logged before the checkpoint of `step`.

    Args:
        entries: the file's entries, in order.
        step: the checkpoint's step.
        history: the checkpoint's `log_history`. It is returned instead if it has more entries than the file (another
            folder, a lost disk). If it is empty, it is ignored.
    """
    history = [entry for entry in history if "step" in entry]
    # Some entries of the step itself were logged after the checkpoint (an epoch's end, a summary). They are logged
    # again.
    here = sum(entry["step"] == step for entry in history) if history else len(entries)
    kept: list[Entry] = []
    for entry in entries:
        if entry["step"] == step:
            here -= 1
        if entry["step"] < step or (entry["step"] == step and here >= 0):
            kept.append(entry)
    if len(kept) < len(history):
        return [{"step": entry["step"]} | dict(entry) for entry in history]
    return kept
