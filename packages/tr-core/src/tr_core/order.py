"""Say which samples each micro-batch uses: a pure function of seed, epoch and position.

All ranks share one order of the samples. A micro-batch of all ranks together is a run of that order, and each rank
takes its slice of it. The position counts samples, so another batch size or world size goes on where the last stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Sampler

from tr_core.randomness import mix


class Slice(NamedTuple):
    """One rank's share of a micro-batch.

    Attributes:
        start: first place of the share in the global order.
        stop: one past its last place.
        end: one past the last place of the micro-batch of all ranks: the position once it is consumed.
        weight: what a mean over this share must be multiplied by, so that the mean over ranks is the mean over all
            the micro-batch's samples; 1 but for a short last micro-batch that does not divide evenly.
    """

    start: int
    stop: int
    end: int
    weight: float


def permutation(num_samples: int, seed: int, epoch: int) -> list[int]:
    """Return the order of an epoch: the one the reference Trainer uses for the same seed."""
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(num_samples, generator=generator).tolist()


def num_micro_batches(num_samples: int, per_step: int, drop_last: bool) -> int:
    """Count the micro-batches that `num_samples` make, `per_step` samples of all ranks in each."""
    return num_samples // per_step if drop_last else -(-num_samples // per_step)


def take_slice(index: int, start: int, num_samples: int, batch_size: int, rank: int, world_size: int) -> Slice:
    """Return a rank's share of the `index`-th micro-batch after position `start`.

    A full micro-batch gives each rank `batch_size` samples in a row. A short one is divided as evenly as can be; a
    rank that would go empty repeats the first sample with weight 0, because every rank must take part in the step.
    """
    per_step = batch_size * world_size
    begin = start + index * per_step
    end = min(begin + per_step, num_samples)
    count = end - begin
    lower, upper = begin + rank * count // world_size, begin + (rank + 1) * count // world_size
    if lower == upper:
        return Slice(begin, begin + 1, end, 0.0)
    return Slice(lower, upper, end, (upper - lower) * world_size / count)


class Batch(list[int]):
    """Indices of one micro-batch, with the seed for whatever is drawn while they are loaded."""

    def __init__(self, indices: Sequence[int], seed: int) -> None:
        super().__init__(indices)
        self.seed = seed

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel to worker processes with the seed."""
        return Batch, (list(self), self.seed)


class EpochSampler(Sampler[list[int]]):
    """Batch sampler over one epoch's global order, for one rank, from any position.

    Args:
        num_samples: samples of the data set.
        batch_size: samples per rank and micro-batch.
        shuffle: permute by seed and epoch; else the data set's own order.
        seed: seed of the order and of what is drawn while loading.
        drop_last: leave out a short last micro-batch.
        rank: this process's number.
        world_size: number of processes.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.num_samples, self.batch_size = num_samples, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.rank, self.world_size = rank, world_size
        self.epoch, self.start = 0, 0

    def seek(self, epoch: int, position: int = 0) -> None:
        """Make the next iteration begin at `position` samples into `epoch`, at no cost."""
        self.epoch, self.start = epoch, position

    def __len__(self) -> int:
        per_step = self.batch_size * self.world_size
        return num_micro_batches(self.num_samples - self.start, per_step, self.drop_last)

    def slice(self, index: int) -> Slice:
        """Return this rank's share of the `index`-th micro-batch of the coming iteration."""
        return take_slice(index, self.start, self.num_samples, self.batch_size, self.rank, self.world_size)

    def __iter__(self) -> Iterator[list[int]]:
        order = permutation(self.num_samples, self.seed, self.epoch) if self.shuffle else range(self.num_samples)
        for index in range(len(self)):
            share = self.slice(index)
            seed = mix(self.seed, self.epoch, share.start)
            yield Batch(order[share.start : share.stop], seed)
