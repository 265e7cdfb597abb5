"""Send a run's log entries to an experiment tracker."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from tr_log.formatting import to_scalar
from tr_log.loggers import get_logger, warning_once
from tr_log.masking import mask_secrets, without_secrets

logger = get_logger(__name__)


def no_event(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
    """Do nothing at an event."""


# A trainer that calls only what a callback does leaves such a method out.
no_event.__dict__["is_no_event"] = True


class EveryEvent:
    """Have all events, each with nothing to do; subclasses override those that matter."""

    on_init_end = on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = no_event
    on_step_begin = on_substep_end = on_pre_optimizer_step = on_optimizer_step = on_step_end = no_event
    on_evaluate = on_predict = on_prediction_step = on_save = on_log = on_draw = on_push_begin = no_event


class Tracker(EveryEvent, ABC):
    """A trainer callback that keeps a tracker open on the main process during a training.

    If the tracker cannot be opened, it raises at once. A later failure loses the entry, and the training continues. The
    first failure of each kind is a warning, and the number of lost entries is logged at the end. An entry outside a
    training, such as an evaluation after it, opens the tracker again.
    """

    name: str

    def __init__(self) -> None:
        self._is_open = False
        self._in_training = False
        self._failures: set[str] = set()
        self._lost = 0

    @classmethod
    def from_arguments(cls, args: Any) -> Self:
        """Return one for a trainer with these arguments; they are read when it is opened."""
        return cls()

    @abstractmethod
    def open(self, args: Any, state: Any, model: Any) -> None:
        """Start recording, and record the settings; `model` may be None."""

    @abstractmethod
    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Record numbers under their names in the tracker, as `tracker_name` gives them."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Finish recording; `failed` is true if the training ends with an exception."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Open the tracker."""
        if state.is_world_process_zero:
            self._end(failed=False)
            self.open(args, state, model)
            self._is_open = self._in_training = True

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Mapping[str, Any] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Record the entry's numbers."""
        if not logs or not state.is_world_process_zero:
            return
        if not self._is_open:
            self.open(args, state, model)
            self._is_open = True
        try:
            self.record(state.global_step, self._numbers(logs))
        except Exception as error:
            self._lost += 1
            self._report(error)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Close the tracker after an evaluation outside a training, because no later event does."""
        if not self._in_training:
            self._end(failed=False)

    def on_train_end(
        self, args: Any, state: Any, control: Any, error: BaseException | None = None, **kwargs: Any
    ) -> None:
        """Close the tracker. `error`, or an exception that is being raised, marks the training as failed."""
        self._in_training = False
        self._end(failed=error is not None or sys.exc_info()[0] is not None)

    def _end(self, *, failed: bool) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            self.close(failed=failed)
        except Exception as error:
            self._report(error)
        if self._lost:
            logger.warning("%s: %d log entries were not recorded; metrics.jsonl has them", self.name, self._lost)
            self._lost = 0

    def _numbers(self, logs: Mapping[str, Any]) -> dict[str, float]:
        numbers = {}
        for key in logs:
            item = to_scalar(logs[key])
            if isinstance(item, int | float):
                numbers[tracker_name(key)] = float(item)
            else:
                warning_once(logger, "%s takes numbers only: %r of the log is left out", self.name, key)
        return numbers

    def _report(self, error: Exception) -> None:
        kind = type(error).__name__
        if kind not in self._failures:
            self._failures.add(kind)
            logger.warning("%s could not record: %s: %s; training goes on without it", self.name, kind, error)


def tracker_name(key: str) -> str:
    """Return the name of a log key in a tracker: `eval_loss` is `eval/loss`, `test_f1` is `test/f1`.

    Any other goes under `train/`.
    """
    for part in ("eval", "test"):
        if key.startswith(f"{part}_"):
            return f"{part}/{key.removeprefix(f'{part}_')}"
    return f"train/{key}"


def run_name(args: Any, state: Any) -> str | None:
    """Return the name of a run in a tracker: `run_name`, and the trial's name in a search; None leaves it open."""
    given = getattr(args, "run_name", None)
    if not getattr(state, "is_hyper_param_search", False):
        return given
    trial = state.trial_name or Path(args.output_dir).name
    return f"{given} {trial}" if given else trial


def settings(args: Any, model: Any = None) -> dict[str, Any]:
    """Return the settings of a run for a tracker: the arguments, and the model's configuration as `model/...`.

    Values are numbers, strings, booleans or None. What is named as a secret, such as `hub_token` or `api_key`, is not
    included, at any depth; tokens and passwords within texts are masked.
    """
    for method in ("to_sanitized_dict", "to_dict"):
        if callable(getattr(args, method, None)):
            known = getattr(args, method)()
            break
    else:
        known = vars(args)
    config: Any = getattr(model, "config", None)
    if callable(getattr(config, "to_dict", None)):
        known = dict(known) | {f"model/{key}": value for key, value in config.to_dict().items()}
    shown = without_secrets({key: value for key, value in known.items() if not key.startswith("_")})
    return {
        key: value if isinstance(value, bool | int | float | str) or value is None else mask_secrets(str(value))
        for key, value in shown.items()
    }


def missing_package(package: str, extra: str) -> ImportError:
    """Return the error for a tracker whose package is not installed."""
    return ImportError(
        f"report_to names {extra!r}, but the package {package} is not installed: "
        f"run `pip install 'tr-log[{extra}]'`, or take {extra} out of report_to",
        name=package,
    )
