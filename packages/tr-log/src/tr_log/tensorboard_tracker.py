"""Write a run's log entries as TensorBoard event files, without torch or tensorflow."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from tr_log.tracker import Tracker, missing_package, settings


class TensorBoardTracker(Tracker):
    """A trainer callback that writes scalars, and the settings as text, for TensorBoard.

    The folder is the arguments' `logging_dir`, else the environment variable TENSORBOARD_LOGGING_DIR, else
    `runs/<date>_<host>` in the output folder. A training with another output folder has another one of these, and a
    trial of a search a folder of its own in a folder that was chosen. If a resumed run writes into the folder of the
    first one, TensorBoard drops the entries after the resumed step.

    Args:
        folder: where to write; overrides all of these.

    Attributes:
        folder: where it writes; None before it is opened, unless it was given.

    Raises:
        ImportError: the package tensorboard is not installed.
    """

    name = "tensorboard"

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__()
        try:
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError as error:
            raise missing_package("tensorboard", "tensorboard") from error
        self.folder = self._given = Path(folder) if folder is not None else None
        self._for: tuple[Any, ...] = ()  # what the folder was chosen for
        self._events, self._summaries, self._make_writer = event_pb2, summary_pb2, EventFileWriter
        self._writer: Any = None

    def open(self, args: Any, state: Any, model: Any) -> None:
        """Start an event file and write the settings into it."""
        folder = self._choose(args, state)
        self._writer = self._make_writer(str(folder))
        if state.global_step > 0:
            log = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(state.global_step + 1, session_log=log)
        text = "```json\n" + json.dumps(settings(args, model), indent=2, default=str) + "\n```"
        self._add(state.global_step, summary=self._summaries.Summary(value=[self._text("settings", text)]))

    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Write scalars."""
        scalar = self._summaries.Summary.Value
        values = [scalar(tag=name, simple_value=number) for name, number in numbers.items()]
        self._add(step, summary=self._summaries.Summary(value=values))
        self._writer.flush()  # at every log, so that the curves of a killed run are complete

    def close(self, *, failed: bool) -> None:
        """Finish the event file."""
        self._writer.close()

    def _choose(self, args: Any, state: Any) -> Path:
        """Return the folder; the same one as before unless the arguments or the trial name another."""
        chosen = self._given or getattr(args, "logging_dir", None) or os.environ.get("TENSORBOARD_LOGGING_DIR")
        trial = ""
        if getattr(state, "is_hyper_param_search", False):
            trial = (state.trial_name or Path(args.output_dir).name).replace("/", "_").replace(os.sep, "_")
        asked_for = (str(chosen), trial, chosen or os.path.abspath(args.output_dir))
        if self.folder is None or asked_for != self._for:
            self._for = asked_for
            self.folder = Path(chosen, trial) if chosen else _new_folder(Path(args.output_dir))
        return self.folder

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))

    def _text(self, tag: str, text: str) -> Any:
        from tensorboard.compat.proto import tensor_pb2, types_pb2

        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        return self._summaries.Summary.Value(
            tag=tag,
            metadata=self._summaries.SummaryMetadata(plugin_data=plugin),
            tensor=tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()]),
        )


def _new_folder(output_dir: Path) -> Path:
    started = datetime.now().astimezone().strftime("%Y-%m-%d_%H-%M-%S")
    return output_dir / "runs" / f"{started}_{socket.gethostname()}"
