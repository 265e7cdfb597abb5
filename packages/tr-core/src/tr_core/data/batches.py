"""Iterate over an epoch of data from any position, with any kind of loader, and give its batches to an override."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader

from tr_core.data.fetch import StreamFetch
from tr_core.data.loaders import SampledLoader, StreamLoader
from tr_core.data.sampler import EpochSampler, MicroBatch, SampledBatches, has_length, num_micro_batches, take_slice
from tr_core.data.user_loader import StatefulSource, UserLoader, skip_batches
from tr_core.model_io import to_device
from tr_core.protocols import Collectives
from tr_core.random_state import find_generators
from tr_log import get_logger

logger = get_logger(__name__)

_UNDIVIDED = (
    "Give each rank the whole of it, without split_dataset_by_node, shard or a DistributedSampler; or return a loader "
    "of this rank's own part from get_train_dataloader, get_eval_dataloader or get_test_dataloader, which is used as "
    "it is"
)

_NO_SHARDS = (
    "elastic divides steps into virtual shards where the Trainer's own loader reads data with a length, and got a {}: "
    "give a data set with __len__ and __getitem__, and return no loader of your own"
)

_OWN_GENERATORS = (
    "elastic draws random numbers by shard, and the data has generators of its own ({}), which each process would draw "
    "from; use the global generators of torch, NumPy or Python, which are seeded for each micro-batch"
)


@runtime_checkable
class Batches(Protocol):
    """Epochs over a loader's data.

    Attributes:
        num_batches: micro-batches of a whole epoch; None if unknown.
        num_samples: samples of a whole epoch of all ranks; None if unknown.
        samples_per_micro_batch: samples of one micro-batch of all ranks.
    """

    num_batches: int | None
    num_samples: int | None
    samples_per_micro_batch: int

    def remaining(self, position: int) -> int | None:
        """Count the micro-batches of an epoch after `position` samples; None if unknown."""
        ...

    def iterate(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        """Yield the micro-batches of an epoch after `position` samples."""
        ...

    def order_state(self) -> dict[str, Any]:
        """Return the state that a checkpoint needs to repeat the order."""
        ...

    def restore_order(self, state: Mapping[str, Any], position: int) -> None:
        """Restore the order of a saved `order_state`, at `position` samples into an epoch.

        Raises:
            ValueError: the order cannot be restored.
        """
        ...

    def source_state(self) -> Any:
        """Return the data's own state of its position in the epoch on this rank; None without one."""
        ...

    def restore_source(self, places: Sequence[Any], rank: int, world_size: int, *, in_epoch: bool = True) -> None:
        """Set the next epoch to begin at a saved state of the data, so that nothing is read twice.

        Without this call the epoch begins at the same position, after reading all samples before it. `places` are the
        results of `source_state` on each rank of the saved run. Between two epochs only the generators of later ones
        are restored.
        """
        ...


def batches_of(
    loader: Any, batch_size: int, collectives: Collectives, *, trains: bool = False, elastic: bool = False
) -> Batches:
    """Return the epochs over a loader: one that the Trainer built, or any iterable. Collective.

    Args:
        loader: of any kind.
        batch_size: samples of a micro-batch of a rank, where a loader does not say it.
        collectives: this process among those with other samples.
        trains: whether epochs follow each other.
        elastic: whether a rank computes several virtual shards, which only the Trainer's own order has.

    Raises:
        ValueError: ranks have data of different lengths for a loader that divides it between them; or `elastic` cannot
            divide it.
    """
    if isinstance(loader, Batches):
        return loader
    if isinstance(loader, DataLoader) and isinstance(loader.batch_sampler, EpochSampler):
        _check_same_data(loader.dataset, collectives)
        set_epoch = loader.fetch.set_epoch if isinstance(loader, SampledLoader) and loader.follows_epoch else None
        if elastic and loader.batch_sampler.shards is None:
            raise ValueError(_NO_SHARDS.format(type(loader).__name__))
        if elastic and (own := find_generators({"dataset": loader.dataset, "collate_fn": loader.collate_fn})):
            raise ValueError(_OWN_GENERATORS.format(", ".join(sorted(own))))
        return SampledBatches(loader, loader.batch_sampler, set_epoch)
    if elastic:
        raise ValueError(_NO_SHARDS.format(type(loader).__name__))
    if isinstance(loader, StreamLoader):
        return _Stream(loader, loader.fetch, collectives)
    own_batch_size = getattr(loader, "batch_size", None)  # None with a batch sampler
    return UserLoader(loader, own_batch_size or batch_size, collectives, follows_epoch=trains)


def _check_same_data(dataset: Any, collectives: Collectives) -> None:
    """Refuse data whose length differs between ranks; warn of data of `datasets` that was made in another way."""
    if collectives.world_size == 1:
        return
    described = collectives.gather_objects((len(dataset), getattr(dataset, "_fingerprint", None)))
    lengths, made = ([each[place] for each in described] for place in (0, 1))
    if len(set(lengths)) > 1:
        raise ValueError(
            f"the data set, {type(dataset).__name__}, has {lengths} samples, by rank: every rank needs the whole data, "
            f"of which it uses its own part. {_UNDIVIDED}"
        )
    if len(set(made)) > 1:
        logger.warning(
            "the data set, %s, was made in another way on each rank (its fingerprints are %s): if the ranks have "
            "different parts, most samples are left out. %s",
            type(dataset).__name__,
            made,
            _UNDIVIDED,
        )


class _Stream:
    """An iterable data set, perhaps with a length; it reaches a position by its own state or by reading.

    It counts micro-batches as well as samples. Each worker process ends its part with a short micro-batch in the middle
    of an epoch. After that, the number of samples does not give the number of micro-batches.

    It records the position at which an epoch ended. No samples follow that position, whatever the data's state. At the
    end of an epoch some data's state points to the beginning of the next one, which would be read once more.
    """

    def __init__(self, loader: DataLoader[Any], stream: StreamFetch, collectives: Collectives) -> None:
        self._loader, self._stream, self._collectives = loader, stream, collectives
        self._parts = max(loader.num_workers, 1)
        # Workers read ahead, each with a copy of the data set; the data set of this process has not moved.
        self._source = StatefulSource(stream.dataset if loader.num_workers == 0 else None)
        self._rounds, self._is_there = 0, False
        self._restored: int | None = None
        self._end: int | None = None  # position at which the epoch ended, once known
        self.samples_per_micro_batch = stream.per_round
        self.num_samples: int | None = len(stream.dataset) if has_length(stream.dataset) else None
        self.num_batches = self.remaining(0)

    def remaining(self, position: int) -> int | None:
        if self.num_samples is None:
            return None
        left = max(self.num_samples - position, 0)
        return num_micro_batches(left, self.samples_per_micro_batch, self._stream.drop_last)

    def iterate(self, epoch: int, position: int) -> Iterator[MicroBatch]:
        if position > 0 and position == self._end:
            return
        stream, rounds = self._stream, self._restored
        self._restored = self._end = None
        self._is_there &= position > 0  # a state from the end of an epoch is of no use to the next one
        if not self._is_there:
            self._source.begin()
        skipped = stream.seek(epoch, position, rounds=rounds if position else None, is_there=self._is_there)
        batches = iter(self._loader) if self._is_there else skip_batches(iter(self._loader), skipped)
        self._rounds, self._is_there = skipped, False
        for inputs, total, content in batches:
            if self._rounds == skipped:
                self._check_is_whole(content)
            share = take_slice(0, 0, total, stream.batch_size, stream.rank, stream.world_size)
            position += total
            self._rounds += 1
            if self._parts == 1 and total < self.samples_per_micro_batch:  # the data itself has ended by then
                self._end = position
            yield MicroBatch(inputs, share.weight, position, total)
        if self._rounds == skipped:
            self._check_is_whole(-1)
        self._end = position

    def _check_is_whole(self, content: int) -> None:
        """Refuse on all ranks a stream of which they read different samples. Collective."""
        if self._stream.world_size == 1:
            return
        highest, negated_lowest = self._collectives.all_reduce_max([content, -content])()
        if highest != -negated_lowest:
            raise ValueError(
                f"the ranks read different samples of {type(self._stream.dataset).__name__}, which is iterable data: "
                "each rank reads all of it, in one order, and uses a slice of every micro-batch. Of data that was "
                f"divided before, most samples would be left out. {_UNDIVIDED}. Data that draws random numbers takes "
                "them from the global generators, or from equal seeds"
            )

    def order_state(self) -> dict[str, Any]:
        read_by = {"workers": self._parts, "samples_per_round": self._stream.per_round}
        return {**read_by, "rounds": self._rounds, "end": self._end}

    def restore_order(self, state: Mapping[str, Any], position: int) -> None:
        self._end = state.get("end")
        now = (self._parts, self._stream.per_round)
        read_by = (state.get("workers", now[0]), state.get("samples_per_round", now[1]))
        if position in (0, self._end) or self._parts == read_by[0] == 1:  # one process reads all samples in order
            return
        if read_by != now:
            raise ValueError(
                f"the checkpoint is {position} samples into an epoch of iterable data that {read_by[0]} processes read "
                f"in turn, {read_by[1]} samples at a time; {self._parts} that read {self._stream.per_round} at a time "
                "would repeat samples and leave others out. Resume with the dataloader_num_workers, batch size and "
                "number of processes as saved, or restart the epoch with ignore_data_skip=True"
            )
        self._restored = state.get("rounds")

    def source_state(self) -> Any:
        return self._source.state_dict()

    def restore_source(self, places: Sequence[Any], rank: int, world_size: int, *, in_epoch: bool = True) -> None:
        # All ranks read the whole stream, so they share one state. At the end of an epoch there is nothing to read.
        if in_epoch and self._source.is_known and places[0] is not None and self._end is None:
            self._source.load_state_dict(places[0])
            self._is_there = True


class AskedBatches:
    """The iterator over an epoch that `get_batch_samples` receives: batches on the device."""

    def __init__(self, batches: Iterator[MicroBatch], device: torch.device) -> None:
        self._batches, self._device = batches, device
        self._size, self._has_ended = 0, False
        self.taken: list[MicroBatch] = []

    def begin_step(self, size: int) -> None:
        """Begin a step that may take `size` micro-batches."""
        self._size, self.taken = size, []

    def __iter__(self) -> AskedBatches:
        return self

    def __next__(self) -> Any:
        if len(self.taken) == self._size:
            raise RuntimeError(
                f"get_batch_samples was asked for {self._size} batches and takes one more: a resumed run would not "
                "know which samples were used. Take num_batches of them, or override get_train_dataloader to leave "
                "batches out"
            )
        batch = next(self._batches, None)
        if batch is None:
            self._has_ended = True
            raise StopIteration
        batch = batch._replace(inputs=to_device(batch.inputs, self._device))
        self.taken.append(batch)
        return batch.inputs

    def returned(self, inputs: Iterable[Any]) -> list[MicroBatch]:
        """Return the micro-batches that were taken, with the inputs that the override made of them.

        Raises:
            RuntimeError: their number is another one than was asked for.
        """
        inputs, number = list(inputs), len(self.taken)
        if number < self._size and not self._has_ended:
            raise RuntimeError(
                f"get_batch_samples was asked for {self._size} batches and took {number} of epoch_iterator: the others "
                "would be trained in a later step, and the length of the run would be another one. Take num_batches "
                "of them, and change their contents where other inputs are needed"
            )
        if len(inputs) != number:
            raise RuntimeError(
                f"get_batch_samples took {number} batches and returned {len(inputs)}: a step uses as many as it takes, "
                "so that a resumed run knows which samples were used. Return one for each, or override "
                "get_train_dataloader, whose batches may have any size"
            )
        return [batch._replace(inputs=own) for batch, own in zip(self.taken, inputs, strict=True)]


# What takes the batches of a step of some size, and counts its targets.
TakeBatches = Callable[[AskedBatches, int], tuple[list[MicroBatch], torch.Tensor | None]]
