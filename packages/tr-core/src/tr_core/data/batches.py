"""Iterate a pass over data from a position, whatever kind of loader it comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader

from tr_core.data.fetch import StreamFetch
from tr_core.data.loaders import has_length
from tr_core.data.order import EpochSampler, MicroBatch, SampledBatches, num_micro_batches, take_slice
from tr_log import progress


@runtime_checkable
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

    def order_state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold for a later run to have the same order."""
        ...

    def restore_order(self, state: Mapping[str, Any], position: int) -> None:
        """Go on in the order of a saved `order_state`, at `position` samples into a pass.

        Raises:
            ValueError: that cannot be done.
        """
        ...


def batches_of(loader: Any, batch_size: int, world_size: int) -> Batches:
    """Return the passes over a loader: one that the Trainer built, or anything iterable.

    Args:
        loader: what `get_train_dataloader` or one of its siblings returned.
        batch_size: samples per rank and micro-batch.
        world_size: number of ranks.
    """
    if isinstance(loader, Batches):
        return loader
    if isinstance(loader, DataLoader) and isinstance(loader.batch_sampler, EpochSampler):
        return SampledBatches(loader, loader.batch_sampler)
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, StreamFetch):
        return _Stream(loader, loader.dataset)
    own_batch_size = getattr(loader, "batch_size", None)  # None with a batch sampler
    return _Foreign(loader, (own_batch_size or batch_size) * world_size)


class _OwnOrder:
    """Data whose order is its own affair."""

    def order_state(self) -> dict[str, Any]:
        return {}

    def restore_order(self, state: Mapping[str, Any], position: int) -> None:
        """Take nothing: there is nothing to restore."""


class _Stream(_OwnOrder):
    """An iterable data set: it may tell a length, and a position is reached by reading."""

    def __init__(self, loader: DataLoader[Any], stream: StreamFetch) -> None:
        self._loader, self._stream = loader, stream
        self.per_micro_batch = stream.per_round
        self.num_samples: int | None = len(stream.dataset) if has_length(stream.dataset) else None
        self.num_batches = self.remaining(0)

    def remaining(self, position: int) -> int | None:
        if self.num_samples is None:
            return None
        left = max(self.num_samples - position, 0)
        return num_micro_batches(left, self.per_micro_batch, self._stream.drop_last)

    def iterate(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        skipped = self._stream.seek(epoch, position)
        batches = _skip(iter(self._loader), skipped)
        stream = self._stream
        for inputs, total in batches:
            share = take_slice(0, 0, total, stream.batch_size, stream.rank, stream.world_size)
            position += total
            yield MicroBatch(inputs, share.weight, position, total)


class _Foreign(_OwnOrder):
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
        set_epoch = getattr(owner, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
