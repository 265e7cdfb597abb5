"""Iterate one pass over data from a position, whatever kind of loader it comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch.utils.data import DataLoader
from tr_log import progress

from tr_core.fetch import StreamFetch
from tr_core.order import EpochSampler, num_micro_batches, take_slice


class MicroBatch(NamedTuple):
    """One rank's collated samples, still where the loader left them.

    Attributes:
        inputs: what the collator made, with host tensors.
        weight: what a mean loss over it is multiplied by (see `tr_core.order.Slice`).
        end: position in the pass, in samples of all ranks, once it is consumed.
        count: samples it holds for all ranks; None where only the ranks themselves know.
    """

    inputs: Any
    weight: float
    end: int
    count: int | None


class Batches(Protocol):
    """Passes over a loader's data.

    Attributes:
        num_batches: micro-batches of a whole pass, None where that cannot be known.
        num_samples: samples of a whole pass of all ranks, None likewise.
        per_micro_batch: samples that all ranks take with one micro-batch.
    """

    num_batches: int | None
    num_samples: int | None
    per_micro_batch: int

    def remaining(self, position: int) -> int | None:
        """Count the micro-batches of a pass after `position` samples; None where that cannot be known."""
        ...

    def iterate(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of a pass after `position` samples."""
        ...


def batches_of(loader: Any, batch_size: int, world_size: int) -> Batches:
    """Return the passes over a loader: one that the Trainer built, or anything iterable.

    Args:
        loader: what `get_train_dataloader` or one of its siblings returned.
        batch_size: samples per rank and micro-batch.
        world_size: number of ranks.
    """
    if isinstance(loader, DataLoader) and isinstance(loader.batch_sampler, EpochSampler):
        return _Sampled(loader, loader.batch_sampler)
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, StreamFetch):
        return _Stream(loader, loader.dataset)
    return _Foreign(loader, batch_size * world_size)


class _Sampled:
    """A map-style data set in the Trainer's own order: any position costs the same."""

    def __init__(self, loader: DataLoader[Any], sampler: EpochSampler) -> None:
        self._loader, self._sampler = loader, sampler
        sampler.seek(0)
        self.num_batches: int | None = len(sampler)
        self.per_micro_batch = sampler.batch_size * sampler.world_size
        self.num_samples: int | None = min(sampler.num_samples, self.num_batches * self.per_micro_batch)

    def remaining(self, position: int) -> int:
        sampler = self._sampler
        return num_micro_batches(max(sampler.num_samples - position, 0), self.per_micro_batch, sampler.drop_last)

    def iterate(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        self._sampler.seek(epoch, position)
        for index, inputs in enumerate(self._loader):
            share = self._sampler.slice(index)
            yield MicroBatch(inputs, share.weight, share.end, share.end - position)
            position = share.end


class _Stream:
    """An iterable data set: its length is unknown, and a position is reached by reading."""

    num_batches: int | None = None
    num_samples: int | None = None

    def __init__(self, loader: DataLoader[Any], stream: StreamFetch) -> None:
        self._loader, self._stream = loader, stream
        self.per_micro_batch = stream.per_round

    def remaining(self, position: int) -> None:
        return None

    def iterate(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        skipped = self._stream.seek(epoch, position)
        batches = _skip(iter(self._loader), skipped)
        stream = self._stream
        for inputs, count in batches:
            share = take_slice(0, 0, count, stream.batch_size, stream.rank, stream.world_size)
            position += count
            yield MicroBatch(inputs, share.weight, position, count)


class _Foreign:
    """A loader that the user made: its order is its own, a position is reached by drawing batches from it."""

    def __init__(self, loader: Any, per_micro_batch: int) -> None:
        self._loader, self.per_micro_batch = loader, per_micro_batch
        try:
            self.num_batches: int | None = len(loader)
        except TypeError:  # no length, or that of an iterable data set
            self.num_batches = None
        self.num_samples = None if self.num_batches is None else self.num_batches * per_micro_batch

    def remaining(self, position: int) -> int | None:
        if self.num_batches is None:
            return None
        return max(self.num_batches - position // self.per_micro_batch, 0)

    def iterate(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        _set_epoch(self._loader, epoch)
        for inputs in _skip(iter(self._loader), position // self.per_micro_batch):
            position += self.per_micro_batch
            yield MicroBatch(inputs, 1.0, position, None)


def _skip(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """Draw and drop `number` batches, showing how far it is: this can take as long as the training did."""
    for _ in progress(range(number), total=number, description="passing over data already used") if number else ():
        next(batches, None)
    return batches


def _set_epoch(loader: Any, epoch: int) -> None:
    for owner in (loader, getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)
