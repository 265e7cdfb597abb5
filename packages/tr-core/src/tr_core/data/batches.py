"""Iterate over an epoch of data from any position, with any kind of loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import DataLoader

from tr_core.data.fetch import StreamFetch
from tr_core.data.loaders import SampledLoader, StreamLoader, has_length
from tr_core.data.sampler import EpochSampler, MicroBatch, SampledBatches, num_micro_batches, take_slice
from tr_core.data.user_loader import StatefulSource, UserLoader
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

    def place_state(self) -> Any:
        """Return where this rank's data is in its pass, as the data itself says it; None where it does not."""
        ...

    def restore_place(self, places: Sequence[Any], rank: int, world_size: int, *, in_epoch: bool = True) -> None:
        """Have the next epoch begin at a place that was saved, so that nothing before it is read again.

        Without it the epoch still begins there, after reading what comes before.

        Args:
            places: what `place_state` returned on each rank of the run that saved.
            rank: this process's number.
            world_size: number of processes now.
            in_epoch: the place is inside an epoch that goes on; else only what later epochs draw from is put back.
        """
        ...


def batches_of(loader: Any, batch_size: int, world_size: int, *, trains: bool = False) -> Batches:
    """Return the passes over a loader: one that the Trainer built, or anything iterable.

    Args:
        loader: what `get_train_dataloader` or one of its siblings returned.
        batch_size: samples per rank and micro-batch.
        world_size: number of ranks.
        trains: the data is trained on: where a user made the loader, its data set follows the epoch.
    """
    if isinstance(loader, Batches):
        return loader
    if isinstance(loader, DataLoader) and isinstance(loader.batch_sampler, EpochSampler):
        set_epoch = loader.fetch.set_epoch if isinstance(loader, SampledLoader) and loader.follows_epoch else None
        return SampledBatches(loader, loader.batch_sampler, set_epoch)
    if isinstance(loader, StreamLoader):
        return _Stream(loader, loader.fetch)
    own_batch_size = getattr(loader, "batch_size", None)  # None with a batch sampler
    return UserLoader(loader, (own_batch_size or batch_size) * world_size, follows_epoch=trains)


class _Stream:
    """An iterable data set: it may tell a length, and a position is reached by its own state or by reading.

    Its micro-batches are counted as well as its samples. Worker processes that each come to their end give short ones
    in the middle of a pass, after which the samples do not say how many micro-batches were read.

    Where a pass ended is noted once that is seen: nothing comes after it, whatever reads, and at the end of a pass some
    data says the place where the next one begins, from which it would be read once more.
    """

    def __init__(self, loader: DataLoader[Any], stream: StreamFetch) -> None:
        self._loader, self._stream = loader, stream
        self._parts = max(loader.num_workers, 1)
        # Workers read ahead, and each has a copy of the data set: what is here has not moved.
        self._place = StatefulSource(stream.dataset if loader.num_workers == 0 else None)
        self._rounds, self._is_there = 0, False
        self._restored: int | None = None
        self._end: int | None = None  # position at which the pass is known to have ended
        self.per_micro_batch = stream.per_round
        self.num_samples: int | None = len(stream.dataset) if has_length(stream.dataset) else None
        self.num_batches = self.remaining(0)

    def remaining(self, position: int) -> int | None:
        if self.num_samples is None:
            return None
        left = max(self.num_samples - position, 0)
        return num_micro_batches(left, self.per_micro_batch, self._stream.drop_last)

    def iterate(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        if position > 0 and position == self._end:
            return
        stream, rounds = self._stream, self._restored
        self._restored = self._end = None
        self._is_there &= position > 0  # a place at the end of a pass is of no use to the next one
        if not self._is_there:
            self._place.begin()
        skipped = stream.seek(epoch, position, rounds=rounds if position else None, is_there=self._is_there)
        batches = iter(self._loader) if self._is_there else _skip(iter(self._loader), skipped)
        self._rounds, self._is_there = skipped, False
        for inputs, total in batches:
            share = take_slice(0, 0, total, stream.batch_size, stream.rank, stream.world_size)
            position += total
            self._rounds += 1
            if self._parts == 1 and total < self.per_micro_batch:  # by then the data itself has come to its end
                self._end = position
            yield MicroBatch(inputs, share.weight, position, total)
        self._end = position

    def order_state(self) -> dict[str, Any]:
        read_by = {"workers": self._parts, "samples_per_round": self._stream.per_round}
        return {**read_by, "rounds": self._rounds, "end": self._end}

    def restore_order(self, state: Mapping[str, Any], position: int) -> None:
        self._end = state.get("end")
        now = (self._parts, self._stream.per_round)
        read_by = (state.get("workers", now[0]), state.get("samples_per_round", now[1]))
        if position in (0, self._end) or self._parts == read_by[0] == 1:  # one process reads one sample after the other
            return
        if read_by != now:
            raise ValueError(
                f"the checkpoint is {position} samples into a pass over iterable data that {read_by[0]} processes read "
                f"in turn, {read_by[1]} samples at a time; {self._parts} that read {self._stream.per_round} at a time "
                "would repeat samples and leave others out. Resume with the dataloader_num_workers, batch size and "
                "number of processes of then, or begin the pass anew with ignore_data_skip=True"
            )
        self._restored = state.get("rounds")

    def place_state(self) -> Any:
        return self._place.take()

    def restore_place(self, places: Sequence[Any], rank: int, world_size: int, *, in_epoch: bool = True) -> None:
        # All ranks read the whole stream: any one's place is every one's. With the end of a pass nothing is to be read.
        if in_epoch and self._place.is_known and places[0] is not None and self._end is None:
            self._place.put_back(places[0])
            self._is_there = True


def _skip(batches: Iterator[Any], number: int) -> Iterator[Any]:
    """Draw and drop `number` batches, showing how far it is: this can take as long as the training did."""
    for _ in progress(range(number), total=number, description="passing over data already used") if number else ():
        next(batches, None)
    return batches
