"""Choose the callbacks of every run: flow, progress, metrics on disk, and the requested trackers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tr_args import Duration, TrainingArguments
from tr_core import plugins
from tr_core.callbacks.ema import EMACallback
from tr_core.callbacks.empty_cache import EmptyCacheCallback
from tr_core.callbacks.flow import DefaultFlowCallback
from tr_core.callbacks.group_lr import RuleRatesCallback
from tr_core.callbacks.wall_time import WallTimeCallback
from tr_core.protocols import Strategy
from tr_log import MetricsFile, PrinterCallback, ProgressCallback, get_logger

logger = get_logger(__name__)

# Callbacks with their own option; `report_to="all"` does not include them.
NOT_TRACKERS = ("hub", "neftune")


def default_callbacks(args: TrainingArguments, strategy: Strategy) -> list[Any]:
    """Return the callbacks that the arguments request, in the order of their calls.

    It reads `disable_tqdm`, `report_to`, `neftune_noise_alpha`, `parameter_rules`, `push_to_hub`, and what `steering`
    reads.

    Raises:
        tr_core.plugins.PluginError: a tracker in `report_to` is not installed.
    """
    named = trackers(args)
    noise = [plugins.load("tr.callbacks", "neftune")(args)] if args.neftune_noise_alpha else []
    hub = [plugins.load("tr.callbacks", "hub")(args)] if args.push_to_hub else []
    display = PrinterCallback() if args.disable_tqdm else ProgressCallback()
    rates = [RuleRatesCallback()] if args.parameter_rules else []
    return [DefaultFlowCallback(), *steering(args, strategy), *rates, *noise, MetricsFile(), *named, display, *hub]


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
        return [_tracker(name)(args) for name in args.report_to if name != "none"]
    usable = []
    for name in sorted(plugins.available("tr.callbacks")):
        if name in NOT_TRACKERS:
            continue
        try:
            usable.append(plugins.load("tr.callbacks", name)(args))
        except ImportError as error:
            logger.info("report_to='all' leaves out %s: %s", name, error)
    return usable


def _tracker(name: str) -> Callable[[TrainingArguments], Any]:
    try:
        return plugins.load("tr.callbacks", name)
    except plugins.PluginError as error:
        raise plugins.PluginError(f"report_to={name!r}: {error}") from None
