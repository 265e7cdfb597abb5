"""Plan a run: its length in optimizer steps, the size of a step, and when gradients are synchronised."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from tr_args import TrainingArguments
from tr_core.data.batches import Batches


@dataclass(frozen=True)
class TrainingPlan:
    """Hold the length of a run, and the size of its steps.

    Attributes:
        max_steps: optimizer steps of the whole run.
        num_epochs: greatest number of epochs begun; an expectation where `ends_by_steps`.
        batches_per_epoch: micro-batches that increase `state.epoch` by one.
        num_samples: samples that the whole run uses, of all ranks, as the speed metrics count them.
        samples_per_step: samples of a full step, of all ranks.
        ends_by_steps: whether `args.max_steps` ends the run, in whatever epoch it is reached.
        accumulation: micro-batches of a full step.
        max_grad_norm: norm that gradients are clipped to; None for no clipping.
        syncs_each_batch: whether gradients are exchanged after every micro-batch, not after a step's last one only.
    """

    max_steps: int
    num_epochs: int
    batches_per_epoch: int
    num_samples: float
    samples_per_step: int
    ends_by_steps: bool = False
    accumulation: int = 1
    max_grad_norm: float | None = None
    syncs_each_batch: bool = False

    def with_max_steps(self, max_steps: int) -> TrainingPlan:
        """Return the plan with another length."""
        return replace(self, max_steps=max_steps)


def make_plan(args: TrainingArguments, data: Batches) -> TrainingPlan:
    """Compute the length of a run from `max_steps`, `num_train_epochs`, accumulation and the data's length.

    Raises:
        ValueError: there is nothing to train on, or no length is known and `max_steps` is not set.
    """
    accumulation = args.gradient_accumulation_steps
    samples_per_step = data.samples_per_micro_batch * accumulation
    plan = partial(
        TrainingPlan,
        samples_per_step=samples_per_step,
        ends_by_steps=args.max_steps > 0,
        accumulation=accumulation,
        max_grad_norm=args.max_grad_norm or None,
        syncs_each_batch=syncs_each_batch(args),
    )
    if data.num_batches is None:
        if args.max_steps <= 0:
            raise ValueError(
                f"the training data has no length and max_steps={args.max_steps}; set max_steps to the number of "
                "optimizer steps to train"
            )
        steps = args.max_steps
        return plan(steps, sys.maxsize, steps * accumulation, float(steps * samples_per_step))
    if data.num_batches == 0:
        raise ValueError(
            f"the training data gives no batch: {data.num_samples} samples used at {data.samples_per_micro_batch} a "
            "micro-batch; add data, lower per_device_train_batch_size, or set dataloader_drop_last=False"
        )
    if args.max_steps > 0:
        epochs = math.ceil(args.max_steps / _steps_per_epoch(args, data))
        return plan(args.max_steps, epochs, data.num_batches, float(args.max_steps * samples_per_step))
    samples = (data.num_samples or 0) * args.num_train_epochs
    steps = steps_of_epochs(args.num_train_epochs, args, data)
    return plan(steps, math.ceil(args.num_train_epochs), data.num_batches, samples)


def steps_of_epochs(epochs: float, args: TrainingArguments, data: Batches) -> int:
    """Count the optimizer steps of so many epochs of data of known length."""
    return math.ceil(epochs * _steps_per_epoch(args, data))


def steps_left(args: TrainingArguments, data: Batches, epoch: int, position: int) -> int | None:
    """Count the optimizer steps from `position` in `epoch` to the end of `num_train_epochs`; None if unknown.

    With unchanged batch size, accumulation and world size this equals what `make_plan` computed at the start.
    """
    if data.num_batches is None:
        return None
    steps_per_epoch = _steps_per_epoch(args, data)
    left_here = _steps_left_in_epoch(args, data, position)
    later = args.num_train_epochs - epoch - 1
    if later >= 0:
        return left_here + math.ceil(later * steps_per_epoch)
    done_here = steps_per_epoch - left_here
    return max(math.ceil((args.num_train_epochs - epoch) * steps_per_epoch) - done_here, 0)


def epochs_for(args: TrainingArguments, data: Batches, epoch: int, position: int, steps: int) -> int | None:
    """Count the epochs begun by the time that `steps` more are done from `position` in `epoch`; None if unknown."""
    if data.num_batches is None:
        return None
    later = max(steps - _steps_left_in_epoch(args, data, position), 0)
    return epoch + 1 + math.ceil(later / _steps_per_epoch(args, data))


def _steps_per_epoch(args: TrainingArguments, data: Batches) -> int:
    return math.ceil((data.num_batches or 0) / args.gradient_accumulation_steps)


def _steps_left_in_epoch(args: TrainingArguments, data: Batches, position: int) -> int:
    return math.ceil((data.remaining(position) or 0) / args.gradient_accumulation_steps)


_REFUSED = {
    "dispatch_batches": (
        (None, False),
        "each rank reads its own share of every micro-batch, and the place in the data is a count of samples that all "
        "ranks share; leave it out",
    ),
    "even_batches": (
        (True,),
        "every rank takes part in every step, and no sample counts twice: a rank left without one adds nothing; leave "
        "it out",
    ),
    "use_seedable_sampler": (
        (True,),
        "the order of the data follows from seed and epoch alone, or a run could not be resumed; leave it out",
    ),
    "use_configured_state": (
        (False,),
        "there is no state of the process to keep: a process group that exists is used in any case; leave it out",
    ),
}
_ACCUMULATION = ("num_steps", "sync_each_batch")


def check_accelerator_config(args: TrainingArguments, world_size: int) -> None:
    """Raise for settings that are not possible, all at once.

    `split_batches` divides the batch sizes by the number of ranks. Batches are always copied with `non_blocking`.
    `gradient_accumulation_kwargs["sync_each_batch"]` exchanges gradients after every micro-batch.
    """
    if problems := list(_problems(args, world_size)):
        raise ValueError("accelerator_config cannot be used as it is:\n" + "\n".join(f"  {p}" for p in problems))


def syncs_each_batch(args: TrainingArguments) -> bool:
    """Whether gradients are exchanged after every micro-batch, not only after the last of a step."""
    return bool((args.accelerator_config.gradient_accumulation_kwargs or {}).get("sync_each_batch", False))


def _problems(args: TrainingArguments, world_size: int) -> Iterator[str]:
    config = args.accelerator_config
    for name, (accepted, reason) in _REFUSED.items():
        if (value := getattr(config, name)) not in accepted:
            yield f"{name}={value!r}: {reason}"
    if config.split_batches:
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            if (size := getattr(args, name)) % world_size:
                yield (
                    f"split_batches=True: {name}={size} cannot be divided among {world_size} processes; make it a "
                    "multiple of their number"
                )
    accumulation = config.gradient_accumulation_kwargs or {}
    if unknown := sorted(set(accumulation) - set(_ACCUMULATION)):
        yield f"gradient_accumulation_kwargs has {unknown}; it takes {list(_ACCUMULATION)}"
    steps = accumulation.get("num_steps", args.gradient_accumulation_steps)
    if steps != args.gradient_accumulation_steps:
        yield (
            f"gradient_accumulation_kwargs has num_steps={steps!r}, but gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}; set only the latter"
        )
    if not isinstance(sync := accumulation.get("sync_each_batch", False), bool):
        yield f"gradient_accumulation_kwargs has sync_each_batch={sync!r}; it needs true or false"
