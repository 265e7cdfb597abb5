"""Hold which sample a run trains with next, and derive that of a run that another program began.

Such a program saved its progress, but not its position in the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tr_core.data.batches import Batches

# A share of a pass, times its micro-batches, is whole but for the rounding of a float.
_ROUNDING = 1e-3


@dataclass
class DataPosition:
    """Which sample comes next: a count, so that batch size and world size may change at resume.

    Attributes:
        epoch: number of the epoch, from 0.
        samples: samples of that epoch consumed by all ranks together.
        pending: what an interruption skipped after the last step: `evaluate`, and perhaps `save` after it.
        is_at_epoch_end: whether an epoch has ended since the last step, with what is due then.
        ends_epoch_early: whether a callback had asked, when a restored checkpoint was saved, to end the epoch there.
        is_retry: whether the next epoch has begun already, because one of its steps is made again.
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


def derive_position(saved: Mapping[str, Any], data: Batches, per_step: int) -> tuple[int, int]:
    """Return the pass, and the samples of it that are used up, of a run of transformers' Trainer.

    That program goes on with the micro-batch that its completed steps lead to, counted with the batch size and
    accumulation of now. The share of the pass that it logs tells whether that is where it was. If it was not, as one
    of these has changed, the place follows from that share and the batch size of then.

    Args:
        saved: `global_step`, `epoch` (passes, with the share of the last one), `max_steps`, `train_batch_size` of a
            device, `world_size`; all but the first may be None.
        data: the training data.
        per_step: samples of a full step, of all ranks.

    Raises:
        ValueError: neither agrees with the data.
    """
    accumulation = per_step // data.per_micro_batch
    if data.num_batches is None:
        return _in_stream(saved, data.per_micro_batch, accumulation)
    step, epoch = saved["global_step"], saved["epoch"]
    passes, steps = divmod(step, max(math.ceil(data.num_batches / accumulation), 1))
    done = steps * accumulation
    if epoch is None or abs(epoch - passes - done / data.num_batches) * data.num_batches < _ROUNDING:
        return passes, done * data.per_micro_batch
    whole, share = divmod(epoch, 1)
    size, samples = (saved["train_batch_size"] or 0) * saved["world_size"], data.num_samples or 0
    for batches in (math.ceil(samples / size), samples // size) if size else ():
        micro_batches = share * batches
        if abs(micro_batches - round(micro_batches)) < _ROUNDING:
            return int(whole), round(micro_batches) * size
    raise ValueError(
        f"the run was at epoch {epoch:g} after {step} steps, which fits neither {data.num_batches} micro-batches a "
        f"pass with {accumulation} a step, as now, nor the {saved['train_batch_size']} samples a device on "
        f"{saved['world_size']} processes that it names: resume with the data, batch size and accumulation of then"
    )


def _in_stream(saved: Mapping[str, Any], per_micro_batch: int, accumulation: int) -> tuple[int, int]:
    """Return the place in data of unknown length, where a pass counts as the micro-batches of the whole run."""
    step, epoch, max_steps = saved["global_step"], saved["epoch"], saved["max_steps"]
    if not epoch or not max_steps:
        return 0, step * accumulation * per_micro_batch
    whole, share = divmod(epoch, 1)
    return int(whole), round(share * max_steps * accumulation) * per_micro_batch
