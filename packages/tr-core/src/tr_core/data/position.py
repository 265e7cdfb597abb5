"""Store the position of a run in its data, and derive it for a checkpoint of another program."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tr_core.data.batches import Batches

# A share of an epoch, times its micro-batches, is whole but for float rounding.
_ROUNDING = 1e-3


@dataclass
class DataPosition:
    """The next sample, as a count of samples, so that batch size and world size may change at resume.

    Attributes:
        epoch: number of the epoch, from 0.
        samples: samples of that epoch consumed by all ranks together.
        pending: actions that an interruption skipped after the last step: `evaluate`, and perhaps `save` after it.
        is_at_epoch_end: whether an epoch has ended since the last step, with its events.
        ends_epoch_early: whether a callback had requested the end of the epoch when the restored checkpoint was saved.
        is_retry: whether the next epoch has begun already, because one of its steps is repeated.
    """

    epoch: int = 0
    samples: int = 0
    pending: list[str] = field(default_factory=list)
    is_at_epoch_end: bool = False
    ends_epoch_early: bool = False
    is_retry: bool = False

    def next_epoch(self) -> None:
        """Move to the first sample of the next epoch."""
        self.epoch, self.samples = self.epoch + 1, 0


def derive_position(saved: Mapping[str, Any], data: Batches, samples_per_step: int) -> tuple[int, int]:
    """Return the epoch and the consumed samples of it, for a run of transformers' Trainer.

    That program resumes at the micro-batch of its completed steps, counted with the current batch size and
    accumulation. The share of the epoch in its log shows whether that is right. If it is not, because one of these has
    changed, the share and the saved batch size give the position.

    Args:
        saved: `global_step`, `epoch` (epochs, with the share of the last one), `max_steps`, `train_batch_size` of a
            device, `world_size`; all but the first may be None.
        data: the training data.
        samples_per_step: samples of a full step, of all ranks.

    Raises:
        ValueError: neither position agrees with the data.
    """
    accumulation = samples_per_step // data.samples_per_micro_batch
    if data.num_batches is None:
        return _in_stream(saved, data.samples_per_micro_batch, accumulation)
    step, epoch = saved["global_step"], saved["epoch"]
    epochs, steps = divmod(step, max(math.ceil(data.num_batches / accumulation), 1))
    done = steps * accumulation
    if epoch is None or abs(epoch - epochs - done / data.num_batches) * data.num_batches < _ROUNDING:
        return epochs, done * data.samples_per_micro_batch
    whole, share = divmod(epoch, 1)
    size, samples = (saved["train_batch_size"] or 0) * saved["world_size"], data.num_samples or 0
    for batches in (math.ceil(samples / size), samples // size) if size else ():
        micro_batches = share * batches
        if abs(micro_batches - round(micro_batches)) < _ROUNDING:
            return int(whole), round(micro_batches) * size
    raise ValueError(
        f"the run was at epoch {epoch:g} after {step} steps, which fits neither {data.num_batches} micro-batches an "
        f"epoch with {accumulation} a step, as now, nor the {saved['train_batch_size']} samples a device on "
        f"{saved['world_size']} processes that it names: resume with the data, batch size and accumulation as saved"
    )


def _in_stream(saved: Mapping[str, Any], samples_per_micro_batch: int, accumulation: int) -> tuple[int, int]:
    """Return the position in data of unknown length, where an epoch counts as the whole run's micro-batches."""
    step, epoch, max_steps = saved["global_step"], saved["epoch"], saved["max_steps"]
    if not epoch or not max_steps:
        return 0, step * accumulation * samples_per_micro_batch
    whole, share = divmod(epoch, 1)
    return int(whole), round(share * max_steps * accumulation) * samples_per_micro_batch
