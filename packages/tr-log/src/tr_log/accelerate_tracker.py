"""Send a run's log entries to a tracker through accelerate: Aim, ClearML, Comet, DVCLive, SwanLab, Trackio.

accelerate and the tracker's library are imported when the tracker is built.
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


class AccelerateTracker(Tracker):
    """A trainer callback that records in one of the trackers of `accelerate.tracking`.

    The run belongs to a project: `project_variable` of the environment, else the argument `project`, else the name of
    the output folder. Each library reads its own environment variables for everything else, such as keys and whether it
    works offline. After a training without an error the run stays open for evaluations, until the next training begins
    or the process ends.

    Attributes:
        name: in `report_to` and in accelerate.
        package: the library to import, and to install.
        project_variable: the library's environment variable for the project.

    Raises:
        ImportError: accelerate or the library is not installed.
    """

    package: str
    project_variable = ""

    def __init__(self) -> None:
        super().__init__()
        try:
            if find_spec("accelerate") is None:
                raise ImportError("No module named 'accelerate'", name="accelerate")
            importlib.import_module(self.package)
        except ImportError as error:
            raise ImportError(
                f"report_to names {self.name!r}, and what it needs cannot be imported ({error}): run `pip install "
                f"'tr-log[{self.name}]'`, or take {self.name} out of report_to",
                name=error.name,
            ) from error
        tracking: Any = importlib.import_module("accelerate.tracking")
        # accelerate's own logger raises where no Accelerator exists.
        tracking.logger = _PlainLogger(logging.getLogger("accelerate.tracking"))
        self._kind = tracking.LOGGER_TYPE_TO_CLASS[self.name]
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
        project = os.environ.get(self.project_variable) or getattr(args, "project", None) or _folder_name(args)
        run = self.build(project, run_name(args, state), args)
        run.main_process_only = False  # it would ask accelerate for its rank, and join a group for that
        run.start()
        self._run = run
        atexit.register(self._finish)
        run.store_init_configuration(settings(args, model))

    def build(self, project: str, run_name: str | None, args: Any) -> Any:
        """Return accelerate's tracker, not started."""
        return self._kind(project)

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


class AimTracker(AccelerateTracker):
    """Record in an Aim repository: in AIM_REPO, `logging_dir` or the output folder."""

    name = package = "aim"

    def build(self, project: str, run_name: str | None, args: Any) -> Any:
        """Return the tracker of a run in an experiment called like the project."""
        folder = os.environ.get("AIM_REPO") or getattr(args, "logging_dir", None) or args.output_dir
        Path(folder).mkdir(parents=True, exist_ok=True)
        return self._kind(run_name or project, logging_dir=folder, experiment=project)


class ClearMLTracker(AccelerateTracker):
    """Record in a ClearML task. A task that the script has started is used and left open."""

    name = package = "clearml"
    project_variable = "CLEARML_PROJECT"

    def build(self, project: str, run_name: str | None, args: Any) -> Any:
        """Return the tracker of a task."""
        task = os.environ.get("CLEARML_TASK") or run_name or project
        return self._kind(project, project_name=project, task_name=task)

    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Log numbers with the step; `eval/loss` is the series `eval` of `loss`."""
        super().record(step, {name.replace("/", "_", 1): number for name, number in numbers.items()})


class CometTracker(AccelerateTracker):
    """Record in a Comet experiment, which is online or offline as Comet's settings say."""

    name = package = "comet_ml"
    project_variable = "COMET_PROJECT_NAME"

    def open(self, args: Any, state: Any, model: Any) -> None:
        """Start an experiment called `run_name`, or go on with the open one."""
        super().open(args, state, model)
        if name := run_name(args, state):
            self._run.tracker.set_name(name)


class DVCLiveTracker(AccelerateTracker):
    """Record in a folder of DVCLive: `dvclive` in the output folder."""

    name = package = "dvclive"

    def build(self, project: str, run_name: str | None, args: Any) -> Any:
        """Return the tracker of a folder."""
        folder = Path(args.output_dir) / "dvclive"  # by default dvc.yaml would be in the working directory
        return self._kind(project, dir=str(folder), dvcyaml=str(folder / "dvc.yaml"), exp_message=run_name)


class SwanLabTracker(AccelerateTracker):
    """Record in a SwanLab experiment, whose mode SWANLAB_MODE sets."""

    name = package = "swanlab"
    project_variable = "SWANLAB_PROJECT"

    def build(self, project: str, run_name: str | None, args: Any) -> Any:
        """Return the tracker of an experiment called `run_name`."""
        return self._kind(project, experiment_name=run_name)


class TrackioTracker(AccelerateTracker):
    """Record in a Trackio project: local, or in the Space that TRACKIO_SPACE_ID names."""

    name = package = "trackio"
    project_variable = "TRACKIO_PROJECT"

    def build(self, project: str, run_name: str | None, args: Any) -> Any:
        """Return the tracker of a run called `run_name`."""
        space = getattr(args, "trackio_space_id", None) or os.environ.get("TRACKIO_SPACE_ID")
        return self._kind(project, name=run_name, **({"space_id": space} if space else {}))


class _PlainLogger(logging.LoggerAdapter[logging.Logger]):
    """Log like accelerate's own logger, on every rank that calls it, and without an Accelerator."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logger, {})
        self._warned: set[str] = set()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Leave out the arguments that only accelerate's logger knows."""
        return msg, {key: value for key, value in kwargs.items() if key not in ("main_process_only", "in_order")}

    def warning_once(self, msg: str) -> None:
        """Warn the first time."""
        if msg not in self._warned:
            self._warned.add(msg)
            self.warning(msg)


def _folder_name(args: Any) -> str:
    return Path(args.output_dir).resolve().name or "runs"
