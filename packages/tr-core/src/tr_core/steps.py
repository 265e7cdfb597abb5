"""Reckon how many optimizer steps a run has."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

from tr_core.data.batches import Batches


@dataclass(frozen=True)
class Plan:
    """How long a run is.

    Attributes:
        max_steps: optimizer steps of the whole run.
        num_epochs: passes over the data that are begun at most.
        batches_per_epoch: micro-batches that make `state.epoch` grow by one.
        num_samples: samples that the whole run uses, of all ranks, as the speed metrics count them.
        per_step: samples of a full step, of all ranks.
    """

    max_steps: int
    num_epochs: int
    batches_per_epoch: int
    num_samples: float
    per_step: int

    def with_max_steps(self, max_steps: int) -> Plan:
        """Return the plan with another length."""
        return replace(self, max_steps=max_steps)


def resolve_steps(value: float | None, max_steps: int) -> int:
    """Return a number of steps that an argument gives: as it is, as a share of the run if below 1, or once in the run.

    Args:
        value: the argument; None is the whole run.
        max_steps: optimizer steps of the run.
    """
    if value is None:
        return max_steps
    return max(math.ceil(value * max_steps) if value < 1 else int(value), 1)


def make_plan(args: Any, data: Batches) -> Plan:
    """Reckon the length of a run from `max_steps`, `num_train_epochs`, accumulation and the data's length.

    Raises:
        ValueError: there is nothing to train on, or no length is known and `max_steps` is not set.
    """
    accumulation = args.gradient_accumulation_steps
    per_step = data.per_micro_batch * accumulation
    if data.num_batches is None:
        if args.max_steps <= 0:
            raise ValueError(
                f"the training data has no length and max_steps={args.max_steps}; set max_steps to the number of "
                "optimizer steps to train"
            )
        steps = args.max_steps
        return Plan(steps, sys.maxsize, steps * accumulation, float(steps * per_step), per_step)
    if data.num_batches == 0:
        raise ValueError(
            f"the training data gives no batch: {data.num_samples} samples used at {data.per_micro_batch} a "
            "micro-batch; add data, lower per_device_train_batch_size, or set dataloader_drop_last=False"
        )
    steps_per_epoch = math.ceil(data.num_batches / accumulation)
    if args.max_steps > 0:
        epochs = math.ceil(args.max_steps / steps_per_epoch)
        return Plan(args.max_steps, epochs, data.num_batches, float(args.max_steps * per_step), per_step)
    samples = (data.num_samples or 0) * args.num_train_epochs
    return Plan(
        math.ceil(args.num_train_epochs * steps_per_epoch),
        math.ceil(args.num_train_epochs),
        data.num_batches,
        samples,
        per_step,
    )


def steps_left(args: Any, data: Batches, epoch: int, position: int) -> int | None:
    """Count the optimizer steps from `position` in `epoch` to the end of `num_train_epochs`; None if unknown.

    With unchanged batch size, accumulation and world size this agrees with what `make_plan` said at the start.
    """
    if data.num_batches is None:
        return None
    accumulation = args.gradient_accumulation_steps
    steps_per_epoch = math.ceil(data.num_batches / accumulation)
    left_here = math.ceil((data.remaining(position) or 0) / accumulation)
    later = args.num_train_epochs - epoch - 1
    if later >= 0:
        return left_here + math.ceil(later * steps_per_epoch)
    done_here = steps_per_epoch - left_here
    return max(math.ceil((args.num_train_epochs - epoch) * steps_per_epoch) - done_here, 0)
