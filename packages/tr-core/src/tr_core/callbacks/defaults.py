"""Choose the callbacks of every run: flow, progress, metrics on disk, and the requested trackers."""

from __future__ import annotations

from typing import Any

from tr_args import Duration, TrainingArguments
from tr_core import plugins
from tr_core.callbacks.ema import EMACallback
from tr_core.callbacks.empty_cache import EmptyCacheCallback
from tr_core.callbacks.flow import DefaultFlowCallback
from tr_core.callbacks.group_lr import RuleRatesCallback
from tr_core.callbacks.trackers import trackers
from tr_core.callbacks.wall_time import WallTimeCallback
from tr_core.protocols import Strategy
from tr_log import MetricsFile, PrinterCallback, ProgressCallback


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
