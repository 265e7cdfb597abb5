"""Compute learning-rate multipliers over a run, and build torch schedules from them.

Each schedule is a function of the number of completed steps. The learning rate of the next step is the base rate times
its value.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast
from weakref import ref

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from tr_args.errors import did_you_mean
from tr_args.types.choices import MetricSchedule
from tr_core.optim.greedy import GreedyLR
from tr_core.signatures import parameters_of

Multiplier = Callable[..., float]


def linear(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Rise from 0 to 1 over the warm-up, then fall to 0 at `total_steps`."""
    if step < warmup_steps:
        return step / warmup_steps
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


def cosine(step: int, *, warmup_steps: int, total_steps: int, num_cycles: float = 0.5) -> float:
    """Rise from 0 to 1 over the warm-up, then follow a cosine; half a wave (the default) ends at 0.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 without restarts.
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)))


def constant(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Return 1."""
    return 1.0


def constant_with_warmup(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Rise from 0 to 1 over the warm-up, then stay at 1."""
    return step / warmup_steps if step < warmup_steps else 1.0


def cosine_with_restarts(step: int, *, warmup_steps: int, total_steps: int, num_cycles: int = 1) -> float:
    """Rise over the warm-up, then fall along a half cosine `num_cycles` times, beginning at 1 each time.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 with cycles of one length.
    """
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    if progress >= 1.0:
        return 0.0
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((num_cycles * progress) % 1.0))))


def polynomial(
    step: int, *, warmup_steps: int, total_steps: int, base_lr: float, lr_end: float = 1e-7, power: float = 1.0
) -> float:
    """Rise over the warm-up, then fall to the learning rate `lr_end` along a polynomial of degree `power`.

    Raises:
        ValueError: `lr_end` is not below the base rate.
    """
    if lr_end >= base_lr:
        raise ValueError(f"lr_end={lr_end:g} must be below learning_rate={base_lr:g}; give a smaller lr_end")
    if step < warmup_steps:
        return step / warmup_steps
    if step > total_steps:
        return lr_end / base_lr
    left = 1 - (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return ((base_lr - lr_end) * left**power + lr_end) / base_lr


def inverse_sqrt(step: int, *, warmup_steps: int, total_steps: int, timescale: int | None = None) -> float:
    """Rise over the warm-up, then fall with the inverse square root of the steps, in units of `timescale` steps.

    `timescale` is the warm-up's length, or 10,000 without one; the fall begins at 1.

    Source: Zhai et al. 2022, arXiv:2106.04560, section 3.4, the "reciprocal square-root" schedule.
    """
    if step < warmup_steps:
        return step / warmup_steps
    scale = timescale or warmup_steps or 10_000
    return 1.0 / math.sqrt((step + scale - warmup_steps) / scale)


def cosine_with_min_lr(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    base_lr: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
) -> float:
    """Rise over the warm-up, then follow a cosine down to `min_lr`, or to `min_lr_rate` of the base rate.

    Raises:
        ValueError: neither or both of the two are given.
    """
    floor = _floor(min_lr, min_lr_rate, base_lr)
    if step < warmup_steps:
        return step / warmup_steps
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return _cosine_above(floor, progress, num_cycles)


def cosine_warmup_with_min_lr(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    base_lr: float,
    num_cycles: float = 0.5,
    min_lr: float | None = None,
    min_lr_rate: float | None = None,
    warmup_lr_rate: float | None = None,
) -> float:
    """Follow `cosine_with_min_lr`, with a warm-up that begins at `warmup_lr_rate` of the base rate instead of at 0.

    Without `warmup_lr_rate` the warm-up begins at one part in `warmup_steps`, so that no step has rate 0; the cosine
    is one step ahead for the same reason.

    Raises:
        ValueError: neither or both of `min_lr` and `min_lr_rate` are given.
    """
    floor = _floor(min_lr, min_lr_rate, base_lr)
    if step < warmup_steps:
        if warmup_lr_rate is None:
            return (step + 1.0) / warmup_steps
        return warmup_lr_rate + (1.0 - warmup_lr_rate) * step / max(1, warmup_steps - 1)
    progress = (step - warmup_steps + 1.0) / max(1.0, total_steps - warmup_steps)
    return _cosine_above(floor, progress, num_cycles)


def warmup_stable_decay(
    step: int,
    *,
    warmup_steps: int,
    total_steps: int,
    num_decay_steps: int,
    num_stable_steps: int | None = None,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> float:
    """Rise from `min_lr_ratio` over the warm-up, stay at 1, then fall to `min_lr_ratio` over the last steps.

    `warmup_type` and `decay_type` are `linear`, `cosine` or `1-sqrt`; the stable part is what the two leave.

    Source: Hu et al. 2024, arXiv:2404.06395, section 4.2; `1-sqrt`: Haegele et al. 2024, arXiv:2405.18392, section 3.

    Raises:
        ValueError: a type is unknown.
    """
    for name, kind in (("warmup_type", warmup_type), ("decay_type", decay_type)):
        if kind not in ("linear", "cosine", "1-sqrt"):
            raise ValueError(f"{name}={kind!r} is not known; choose linear, cosine or 1-sqrt")
    stable = total_steps - warmup_steps - num_decay_steps if num_stable_steps is None else num_stable_steps
    if step < warmup_steps:
        progress = step / warmup_steps
        wave = 0.5 * (1 - math.cos(math.pi * progress))
        rise = {"linear": progress, "cosine": wave, "1-sqrt": 1 - math.sqrt(1 - progress)}
        return max(0.0, rise[warmup_type] * (1 - min_lr_ratio) + min_lr_ratio)
    if step < warmup_steps + stable:
        return 1.0
    if step >= warmup_steps + stable + num_decay_steps:
        return min_lr_ratio
    progress = (step - warmup_steps - stable) / max(1, num_decay_steps)
    wave = 0.5 * (1 + math.cos(math.pi * num_cycles * 2.0 * progress))
    fall = {"linear": 1 - progress, "cosine": wave, "1-sqrt": 1 - math.sqrt(progress)}
    return max(0.0, fall[decay_type] * (1 - min_lr_ratio) + min_lr_ratio)


def _cosine_above(floor: float, progress: float, num_cycles: float) -> float:
    """Return a cosine of `num_cycles` waves, between 1 and `floor`."""
    factor = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
    return max(0.0, factor * (1 - floor) + floor)


def _floor(min_lr: float | None, min_lr_rate: float | None, base_lr: float) -> float:
    if (min_lr is None) == (min_lr_rate is None):
        raise ValueError(
            f"give one of min_lr (={min_lr}) and min_lr_rate (={min_lr_rate}) in lr_scheduler_kwargs, not both or "
            "neither"
        )
    return min_lr / base_lr if min_lr is not None else cast(float, min_lr_rate)


SCHEDULES: dict[str, Multiplier] = {
    "linear": linear,
    "cosine": cosine,
    "cosine_with_restarts": cosine_with_restarts,
    "polynomial": polynomial,
    "constant": constant,
    "constant_with_warmup": constant_with_warmup,
    "inverse_sqrt": inverse_sqrt,
    "cosine_with_min_lr": cosine_with_min_lr,
    "cosine_warmup_with_min_lr": cosine_warmup_with_min_lr,
    "warmup_stable_decay": warmup_stable_decay,
}
FOLLOW_METRIC: dict[str, type[ReduceLROnPlateau]] = {
    MetricSchedule.PLATEAU: ReduceLROnPlateau,
    MetricSchedule.GREEDY: GreedyLR,
}
"""Schedules that are stepped with the result of an evaluation, by name."""


def follows_metric(schedule: Any) -> bool:
    """Whether a schedule is stepped with the result of an evaluation: whether its `step` needs an argument."""
    if isinstance(schedule, ReduceLROnPlateau):
        return True
    given = list(parameters_of(schedule.step).values())[:1]
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(parameter.kind in by_position and parameter.default is parameter.empty for parameter in given)


def get_scheduler(
    name: str | Multiplier,
    optimizer: Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> LRScheduler:
    """Make the schedule called `name` for an optimizer.

    Args:
        name: a key of `SCHEDULES`; `reduce_lr_on_plateau`, torch's own, or `greedy`, which are stepped with a metric;
            or a function `(step, *, warmup_steps, total_steps, **kwargs) -> multiplier`. A function with a parameter
            `base_lr` also receives the first group's base rate.
        optimizer: its current learning rates are multiplied. A group that is added later follows the same function,
            from the rate that it was added with.
        num_warmup_steps: optimizer steps of the warm-up.
        num_training_steps: optimizer steps of the run.
        scheduler_specific_kwargs: further arguments of the schedule (`num_cycles`).

    Raises:
        ValueError: the name or an argument is unknown, or the length of the run is needed and missing.
    """
    extra = dict(scheduler_specific_kwargs or {})
    if str(name) in FOLLOW_METRIC:
        return _following(str(name), optimizer, num_warmup_steps, extra)
    function = name if callable(name) else _named(name)
    if num_training_steps is None and not str(name).startswith("constant"):
        raise ValueError(f"the schedule {name!r} needs num_training_steps, the optimizer steps of the run")
    parameters = parameters_of(function)
    _check_arguments(name, set(parameters), extra)
    if "base_lr" in parameters:
        extra["base_lr"] = optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])
    total = 0 if num_training_steps is None else num_training_steps
    schedule = LambdaLR(optimizer, partial(function, warmup_steps=num_warmup_steps, total_steps=total, **extra))
    _take_in_new_groups(schedule)
    return schedule


def _take_in_new_groups(schedule: LambdaLR) -> None:
    """Add new groups of the optimizer to a schedule at once; a check in every step would cost every step."""
    optimizer: Any = schedule.optimizer
    add, known = optimizer.add_param_group, ref(schedule)

    @wraps(add)
    def add_and_schedule(param_group: dict[str, Any]) -> None:
        add(param_group)
        scheduled, group = known(), optimizer.param_groups[-1]
        if scheduled is not None:
            scheduled.base_lrs.append(group.setdefault("initial_lr", group["lr"]))
            scheduled.lr_lambdas.append(scheduled.lr_lambdas[0])

    optimizer.add_param_group = add_and_schedule


def _named(name: str) -> Multiplier:
    key = str(name)
    if key not in SCHEDULES:
        known = sorted([*SCHEDULES, *FOLLOW_METRIC])
        raise ValueError(f"unknown lr_scheduler_type={key!r}; known are {', '.join(known)}{did_you_mean(key, known)}")
    return SCHEDULES[key]


def _following(name: str, optimizer: Optimizer, num_warmup_steps: int, extra: dict[str, Any]) -> LRScheduler:
    kind = FOLLOW_METRIC[name]
    _check_arguments(name, set(parameters_of(kind.__init__)) - {"self", "optimizer"}, extra)
    if num_warmup_steps:
        raise ValueError(
            f"the schedule {name!r} follows evaluations and has no warm-up, but warmup_steps asks for "
            f"{num_warmup_steps} steps of it; set warmup_steps=0"
        )
    return kind(optimizer, **extra)


def _check_arguments(name: str | Multiplier, taken: set[str], extra: dict[str, Any]) -> None:
    known = taken - {"step", "warmup_steps", "total_steps", "base_lr"}
    if unknown := sorted(set(extra) - known):
        raise ValueError(
            f"lr_scheduler_kwargs has {unknown}, which the schedule {name!r} does not take; it takes "
            f"{sorted(known) or 'none'}"
        )
    if name == "warmup_stable_decay" and "num_decay_steps" not in extra:
        raise ValueError("the schedule 'warmup_stable_decay' needs num_decay_steps in lr_scheduler_kwargs")
