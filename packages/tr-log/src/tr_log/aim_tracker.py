"""Send a run's log entries to Aim, by the tracker that accelerate has for it.

Both libraries are imported when the tracker is built.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
from collections.abc import MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tr_log.tracker import Tracker, run_name, settings


class AimTracker(Tracker):
    """A trainer callback that records in an Aim repository: in AIM_REPO, `logging_dir` or the output folder.

    The run belongs to an experiment: the argument `project`, else the name of the output folder. After a training
    without an error the run stays open for evaluations, until the next training begins or the process ends.

    Raises:
        ImportError: accelerate or aim is not installed.
    """

    name = "aim"

    def __init__(self) -> None:
        super().__init__()
        try:
            if find_spec("accelerate") is None:
                raise ImportError("No module named 'accelerate'", name="accelerate")
            importlib.import_module("aim")
        except ImportError as error:
            raise ImportError(
                f"report_to names 'aim', and what it needs cannot be imported ({error}): run "
                "`pip install 'tr-log[aim]'`, or take aim out of report_to",
                name=error.name,
            ) from error
        tracking: Any = importlib.import_module("accelerate.tracking")
        # accelerate's own logger raises where no Accelerator exists.
        tracking.logger = _PlainLogger(logging.getLogger("accelerate.tracking"), {})
        self._kind = tracking.AimTracker
        self._run: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Finish the run of an earlier training and open a new one."""
        if state.is_world_process_zero:
            self._finish()
        super().on_train_begin(args, state, control, model=model, **kwargs)

    def open(self, args: Any, state: Any, model: Any) -> None:
        """Start a run, or go on with the open one."""
        if self._run is not None:
            return
        project = getattr(args, "project", None) or Path(args.output_dir).resolve().name or "runs"
        folder = os.environ.get("AIM_REPO") or getattr(args, "logging_dir", None) or args.output_dir
        Path(folder).mkdir(parents=True, exist_ok=True)
        run = self._kind(run_name(args, state) or project, logging_dir=folder, experiment=project)
        run.main_process_only = False  # it would ask accelerate for its rank, and join a group for that
        run.start()
        self._run = run
        atexit.register(self._finish)
        run.store_init_configuration(settings(args, model))

    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Log numbers with the step."""
        self._run.log(numbers, step=step)

    def close(self, *, failed: bool) -> None:
        """Finish the run after a failed training; otherwise it stays open for evaluations."""
        if failed:
            self._finish()

    def _finish(self) -> None:
        atexit.unregister(self._finish)
        run, self._run = self._run, None
        if run is not None:
            run.finish()


class _PlainLogger(logging.LoggerAdapter[logging.Logger]):
    """Log like accelerate's own logger, on every rank that calls it, and without an Accelerator."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Leave out the arguments that only accelerate's logger knows."""
        return msg, {key: value for key, value in kwargs.items() if key not in ("main_process_only", "in_order")}
