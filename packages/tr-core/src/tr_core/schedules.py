"""Compute learning-rate multipliers over a run, and make torch schedules of them.

Each schedule is a function of the number of completed steps: the learning rate of the next step is the base rate
times what it returns.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

Multiplier = Callable[..., float]


def linear(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Rise from 0 to 1 over the warm-up, then fall to 0 at `total_steps`."""
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup_steps))


def cosine(step: int, *, warmup_steps: int, total_steps: int, num_cycles: float = 0.5) -> float:
    """Rise from 0 to 1 over the warm-up, then follow a cosine; half a wave (the default) ends at 0.

    Source: Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 without restarts.
    """
    if step < warmup_steps:
        return step / max(1, warmup_steps)
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress)))


def constant(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Stay at 1."""
    return 1.0


def constant_with_warmup(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Rise from 0 to 1 over the warm-up, then stay at 1."""
    return step / max(1, warmup_steps) if step < warmup_steps else 1.0


SCHEDULES: dict[str, Multiplier] = {
    "linear": linear,
    "cosine": cosine,
    "constant": constant,
    "constant_with_warmup": constant_with_warmup,
}


def get_scheduler(
    name: str | Multiplier,
    optimizer: Optimizer,
    num_warmup_steps: int = 0,
    num_training_steps: int | None = None,
    scheduler_specific_kwargs: dict[str, Any] | None = None,
) -> LRScheduler:
    """Make the schedule called `name` for an optimizer.

    Args:
        name: one of `linear`, `cosine`, `constant`, `constant_with_warmup`, or a function
            `(step, *, warmup_steps, total_steps, **kwargs) -> multiplier`.
        optimizer: whose learning rates, as they are now, are multiplied.
        num_warmup_steps: optimizer steps of the warm-up.
        num_training_steps: optimizer steps of the run.
        scheduler_specific_kwargs: further arguments of the schedule (`num_cycles`).

    Raises:
        ValueError: the name or an argument is unknown, or the length of the run is needed and missing.
    """
    function = name if callable(name) else _named(name)
    if num_training_steps is None and not str(name).startswith("constant"):
        raise ValueError(f"the schedule {name!r} needs num_training_steps, the optimizer steps of the run")
    extra = dict(scheduler_specific_kwargs or {})
    _check_arguments(name, function, extra)
    total = 0 if num_training_steps is None else num_training_steps
    # The schedule counts with this partial, so that LambdaLR has no attribute of ours to save.
    return LambdaLR(optimizer, partial(function, warmup_steps=num_warmup_steps, total_steps=total, **extra))


def _named(name: str) -> Multiplier:
    key = str(name)
    if key not in SCHEDULES:
        raise ValueError(f"unknown lr_scheduler_type={key!r}; known are {', '.join(sorted(SCHEDULES))}")
    return SCHEDULES[key]


def _check_arguments(name: str | Multiplier, function: Multiplier, extra: dict[str, Any]) -> None:
    known = set(inspect.signature(function).parameters) - {"step", "warmup_steps", "total_steps"}
    if unknown := sorted(set(extra) - known):
        raise ValueError(
            f"lr_scheduler_kwargs has {unknown}, which the schedule {name!r} does not take; it takes "
            f"{sorted(known) or 'none'}"
        )
