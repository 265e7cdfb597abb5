"""Resume a learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from tr_core.checkpoint.optimizer_groups import Group, GroupChange, set_rate
from tr_core.optim.schedules import FOLLOW_METRIC

# Functions of the number of steps, and schedules that remember evaluations. Other schedules belong to the user.
_FUNCTIONS = (LambdaLR,)
_FOLLOWING = tuple(FOLLOW_METRIC.values())


def is_function(schedule: LRScheduler) -> bool:
    """Whether a schedule's rates are a function of the number of steps."""
    return type(schedule) in _FUNCTIONS


def is_known(schedule: LRScheduler) -> bool:
    """Whether changed arguments can be applied to a schedule of this kind."""
    return type(schedule) in (*_FUNCTIONS, *_FOLLOWING)


def describe_schedule(schedule: LRScheduler) -> dict[str, Any]:
    """Return the kind and the options of a schedule that was just built, as plain JSON values."""
    held = vars(schedule).items() if type(schedule) in _FOLLOWING else ()
    options = {name: value for name, value in held if not name.startswith("_") and _is_plain(value)}
    return {"kind": type(schedule).__name__, "options": options}


def load_as_saved(schedule: LRScheduler, state: Mapping[str, Any]) -> None:
    """Load a saved state into a schedule without changes.

    Raises:
        ValueError: the state belongs to a schedule of another kind.
    """
    for kind, sign in ((LambdaLR, "lr_lambdas"), (ReduceLROnPlateau, "num_bad_epochs")):
        if isinstance(schedule, kind) != (sign in state) and (sign not in state or is_known(schedule)):
            raise ValueError(
                f"the schedule in the checkpoint is not a {type(schedule).__name__}, which the arguments "
                "make now; resume with the saved lr_scheduler_type"
            )
    schedule.load_state_dict(dict(state))


def continue_function(
    schedule: LambdaLR, state: Mapping[str, Any] | None, rates: Sequence[GroupChange], place: int | None
) -> None:
    """Resume a schedule that is a function of the steps.

    `place` is the number of steps that count as done; None keeps the saved schedule and rates. `state` is None if the
    checkpoint's schedule was of another kind.
    """
    if state is not None:
        load_as_saved(schedule, state)
    for change in rates:
        schedule.base_lrs[change.group] = change.current
    if place is None:
        return
    schedule.last_epoch = place
    schedule._step_count = place + 1
    groups = schedule.optimizer.param_groups
    for group, base, function in zip(groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["initial_lr"] = base
        set_rate(group, float(base) * function(place))
    schedule._last_lr = [group["lr"] for group in groups]


def continue_following(
    schedule: ReduceLROnPlateau,
    state: Mapping[str, Any] | None,
    rates: Sequence[GroupChange],
    saved_options: Mapping[str, Any],
) -> None:
    """Resume a schedule that remembers evaluations; rates that it has lowered stay lower by the same factor.

    Without a saved `state` the schedule begins at the current rates.
    """
    made = dict(vars(schedule))
    if state is not None:
        load_as_saved(schedule, state)
        changed = {n: v for n, v in saved_options.items() if n in made and _is_plain(made[n]) and made[n] != v}
        vars(schedule).update({name: made[name] for name in changed})
        schedule._init_is_better(schedule.mode, schedule.threshold, schedule.threshold_mode)
    groups = schedule.optimizer.param_groups
    for change in rates:
        group = groups[change.group]
        rate = float(group["lr"])  # sync: at a resume, if an optimizer keeps its rates on the device
        set_rate(group, rate * (change.current / change.saved) if change.saved else change.current)
    schedule._last_lr = [group["lr"] for group in groups]


def begin_at_base(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> None:
    """Set the rates that a new schedule begins with."""
    for group, made in zip(optimizer.param_groups, groups, strict=True):
        set_rate(group, made.rate)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
