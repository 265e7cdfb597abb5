"""Bind a file of log entries to a run: a new run renames an old file, a resumed run rewinds its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tr_log.line_file import LineFile
from tr_log.loggers import get_logger
from tr_log.tracker import EveryEvent

logger = get_logger(__name__)

Entry = Mapping[str, Any]


class RunFile(EveryEvent, ABC):
    """A trainer callback that writes a run's log entries to a file of the output folder, on the main process.

    A resumed run leaves the same file as a run that never stopped, so entries after the resumed step are dropped. A new
    run in the same folder keeps the old file as `NAME-1.EXT` and so on. A resumed run without steps left changes the
    file only when it logs something, such as a pending evaluation.

    Args:
        name: the file's name in the output folder.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._file: LineFile | None = None
        self._given: Path | None = None
        self._is_new = False
        self._reached: tuple[int, Sequence[Entry]] | None = None

    @abstractmethod
    def append(self, file: LineFile, entry: dict[str, Any]) -> None:
        """Add one entry, its `step` first."""

    @abstractmethod
    def wind_back(self, file: LineFile, step: int, history: Sequence[Entry]) -> tuple[int, int]:
        """Keep the entries that were logged before the checkpoint of `step`.

        Returns:
            The number of entries left, and the number before.

        Raises:
            OSError: the file could not be read.
        """

    def forget(self) -> None:
        """Drop the entries of an earlier run from memory."""

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
            self.forget()
        return self._file

    def _start(self, file: LineFile) -> None:
        # An evaluation before the training is part of the run. Then the file is already this run's own.
        if self._is_new:
            return
        self.forget()
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


def entries_until(entries: Sequence[Entry], step: int, history: Sequence[Entry]) -> list[Entry]:
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
