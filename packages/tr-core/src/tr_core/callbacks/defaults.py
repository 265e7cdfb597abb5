"""Choose the callbacks of every run: flow, progress, metrics on disk, and the requested trackers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from tr_args import Duration, TrainingArguments
from tr_core import plugins
from tr_core.callback import TrainerCallback
from tr_core.callbacks.ema import EMACallback
from tr_core.callbacks.wall_time import WallTimeCallback
from tr_core.optim.parameter_rules import learning_rates
from tr_core.protocols import Strategy
from tr_core.state import TrainerControl, TrainerState
from tr_log import EventsFile, MetricsFile, PrinterCallback, ProgressCallback, ReportFile, get_logger, progress_bar
from tr_log.phases import active_clock, doing

logger = get_logger(__name__)

_TRACKERS, _CALLBACKS = "tr.trackers", "tr.callbacks"
# Callbacks that arguments of their own ask for: no trackers, though they share the group of callbacks.
CALLBACKS_BY_ARGUMENT = {"neftune": "neftune_noise_alpha", "hub": "push_to_hub"}


def default_callbacks(args: TrainingArguments, strategy: Strategy) -> list[Any]:
    """Return the callbacks that the arguments request, in the order of their calls.

    It reads `disable_tqdm`, `report_to`, `neftune_noise_alpha`, `parameter_rules`, `push_to_hub`, and what `steering`
    reads.

    Raises:
        tr_core.plugins.PluginError: a tracker in `report_to` is not installed.
    """
    named = trackers(args)
    noise = [plugins.load(_CALLBACKS, "neftune")(args)] if args.neftune_noise_alpha else []
    hub = [plugins.load(_CALLBACKS, "hub")(args)] if args.push_to_hub else []
    for callback in hub:
        callback.waiting = partial(_uploading, args)
    display = PrinterCallback() if args.disable_tqdm else ProgressCallback()
    rates = [RuleRatesCallback()] if args.parameter_rules else []
    flow, *files, report = (kind() for kind in DEFAULT_CALLBACKS)
    return [flow, *steering(args, strategy), *rates, *noise, *files, *named, display, report, *hub]


def _uploading(args: TrainingArguments) -> AbstractContextManager[Any]:
    """Return a block in which the display says that the run waits for the Hub."""
    if active_clock() is not None or args.disable_tqdm:
        return doing("uploading")
    return progress_bar("uploading")


def steering(args: TrainingArguments, strategy: Strategy) -> list[Any]:
    """Return the callbacks that only some runs need: wall time, weight averaging, freeing memory.

    It reads `max_time`, the strategies of logging, evaluating and saving, `ema_decay` and `torch_empty_cache_steps`.
    """
    wanted: list[Any] = []
    times = (args.max_time, args.logging_strategy, args.eval_strategy, args.save_strategy)
    if any(isinstance(time, Duration) for time in times):
        wanted.append(WallTimeCallback(args, strategy))
    if args.ema_decay is not None:
        wanted.append(EMACallback.from_arguments(args))
    if args.torch_empty_cache_steps is not None and strategy.device.type != "cpu":  # a CPU has no such cache
        wanted.append(EmptyCacheCallback(strategy.device, args.torch_empty_cache_steps))
    return wanted


def trackers(args: TrainingArguments) -> list[Any]:
    """Return the trackers in `report_to`: `none` means no tracker, `all` every usable one.

    Raises:
        tr_core.plugins.PluginError: a named one is not installed.
        ImportError: the library of a named one is not installed.
    """
    if "all" not in args.report_to:
        return [tracker_factory(name)(args) for name in args.report_to if name != "none"]
    usable = []
    for name in sorted({*plugins.available(_TRACKERS), *_among_callbacks()}):
        factory = tracker_factory(name)
        if getattr(factory, "by_name_only", False):
            continue
        try:
            usable.append(factory(args))
        except ImportError as error:
            logger.info("report_to='all' leaves out %s: %s", name, error)
    return usable


def tracker_factory(name: str) -> Callable[[TrainingArguments], Any]:
    """Return the function of the arguments that builds the tracker with a name in `report_to`.

    Raises:
        tr_core.plugins.PluginError: it is not installed.
    """
    try:
        return plugins.load(_CALLBACKS if name in _among_callbacks() else _TRACKERS, name)
    except plugins.PluginError as error:
        raise plugins.PluginError(f"report_to={name!r}: {error}") from None


def _among_callbacks() -> set[str]:
    """Return the trackers that packages offer in the group of all callbacks, where trackers were at first."""
    return {*plugins.available(_CALLBACKS)}.difference(CALLBACKS_BY_ARGUMENT, plugins.available(_TRACKERS))


class DefaultFlowCallback(TrainerCallback):
    """Request logs, evaluations and checkpoints by their strategies, and end the run at its last step.

    Under the `steps` strategies the last step is evaluated and saved even off the interval. Under a strategy of wall
    time it is also evaluated and saved before it is due. `WallTimeCallback` requests what is due by time. The `best`
    saving strategy is decided elsewhere, when an evaluation's result is known.
    """

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Apply the `steps` strategies and the end of the run."""
        step = state.global_step
        if (step == 1 and args.logging_first_step) or (
            args.logging_strategy == "steps" and step % state.logging_steps == 0
        ):
            control.should_log = True
        if args.eval_strategy == "steps" and args.eval_delay <= step and step % state.eval_steps == 0:
            control.should_evaluate = True
        if args.save_strategy == "steps" and step % state.save_steps == 0:
            control.should_save = True
        if step >= state.max_steps:
            control.should_training_stop = True
            control.should_evaluate |= _acts_at_the_end(args.eval_strategy) and args.eval_delay <= step
            control.should_save |= _acts_at_the_end(args.save_strategy)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the `epoch` strategies."""
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True


def _acts_at_the_end(strategy: str) -> bool:
    return strategy == "steps" or isinstance(strategy, Duration)


class RuleRatesCallback(TrainerCallback):
    """Add `learning_rate/<name of the rule>`, as the last step used it, to every log entry with a `learning_rate`.

    It runs before the callbacks that write logs. Every checkpoint holds the rates, because a log right after a resume
    describes a step before the checkpoint.
    """

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Record the rates before the schedule changes them."""
        self._rates = learning_rates(kwargs["optimizer"])

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the rates to the entry, in the history too."""
        logs = kwargs["logs"]
        if "learning_rate" in logs:
            logs.update(self._rates)
            state.log_history[-1].update(self._rates)

    def state_dict(self) -> dict[str, Any]:
        """Return the rates."""
        return {"rates": self._rates}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load the rates."""
        self._rates = dict(state_dict["rates"])


class EmptyCacheCallback(TrainerCallback):
    """Release the memory that torch's allocator caches: slower, but the peak may be lower.

    Args:
        device: whose memory: a device whose torch module has `empty_cache`, as CUDA, MPS and XPU have.
        every_steps: optimizer steps between two releases.
    """

    def __init__(self, device: torch.device, every_steps: int) -> None:
        self.every_steps = every_steps
        self._empty_cache = torch.get_device_module(device).empty_cache

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Release the cache, if due."""
        if state.global_step % self.every_steps == 0:
            self._empty_cache()  # sync: the driver waits for the device before it takes memory back


# What every run has, whatever its arguments.
DEFAULT_CALLBACKS: list[type[Any]] = [DefaultFlowCallback, MetricsFile, EventsFile, ReportFile]
