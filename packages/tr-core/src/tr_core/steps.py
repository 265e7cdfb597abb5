"""Cut a pass over the data into optimizer steps, and reckon how many there are."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from tr_core.batches import Batches, MicroBatch

CountItems = Callable[[Sequence[MicroBatch]], "torch.Tensor | None"]


@dataclass(slots=True)
class StepData:
    """The micro-batches of one optimizer step.

    Attributes:
        micro_batches: they, to be iterated once; loaded one at a time where nothing must be known of all beforehand.
        size: how many they are.
        num_items: targets in all of them over all ranks, a scalar tensor on the device; None if not counted.
    """

    micro_batches: Iterator[MicroBatch]
    size: int
    num_items: torch.Tensor | None


def iterate_steps(
    data: Batches, epoch: int, position: int, accumulation: int, count_items: CountItems | None
) -> Iterator[StepData]:
    """Yield the steps of a pass after `position` samples; the last one takes what is left.

    Micro-batches are loaded as they are used. Only where targets are counted, or where the length of the pass is
    unknown, are all of a step loaded first, and then to the host only.

    Raises:
        ValueError: the loader gives fewer batches than its length says.
    """
    batches = data.iterate(epoch, position)
    remaining = data.remaining(position)
    while remaining is None or remaining > 0:
        size = accumulation if remaining is None else min(accumulation, remaining)
        if remaining is not None and count_items is None:
            yield StepData(_exactly(batches, size), size, None)
        else:
            loaded = list(islice(batches, size) if remaining is None else _exactly(batches, size))
            if not loaded:
                return
            yield StepData(iter(loaded), len(loaded), count_items(loaded) if count_items else None)
        if remaining is not None:
            remaining -= size


def _exactly(batches: Iterator[MicroBatch], size: int) -> Iterator[MicroBatch]:
    for number in range(size):
        batch = next(batches, None)
        if batch is None:
            raise ValueError(
                f"the training data loader ended {size - number} batches before its length; a loader's __len__ must "
                "be the number of batches it gives, or raise TypeError if that is unknown"
            )
        yield batch


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
