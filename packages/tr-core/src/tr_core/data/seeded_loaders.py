"""Loaders that look like torch's own and load each micro-batch with random numbers of its own."""

from __future__ import annotations

from collections.abc import Iterator
from operator import is_
from typing import Any

from torch.utils.data import DataLoader

from tr_core.data.fetch import Collate, MapFetch, StreamFetch, identity
from tr_core.data.order import EpochSampler, num_micro_batches
from tr_core.data.worker_signals import leave_signals_to_parent, signals_wait

# What a loader may be given after it was built. They are read when an iteration begins.
_OPTIONS = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
)


class SeededLoader(DataLoader[Any]):
    """A loader whose `dataset` and `collate_fn` are the user's own; another one inside of it does the reading.

    What is assigned to `collate_fn`, `worker_init_fn` and the other options acts from the next iteration. What is
    changed in the data set acts at once where this process loads, and from the next epoch with worker processes, which
    have copies; workers that live on (`persistent_workers`) keep theirs, as torch's do.
    """

    fetch: Any
    _reader: DataLoader[Any] | None = None
    _reader_options: tuple[Any, ...] = ()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  torch's names its own class of iterators
        """Iterate over this rank's micro-batches."""
        options = {name: getattr(self, name) for name in _OPTIONS}
        made_of = (self.collate_fn, *options.values())
        reader = self._reader
        if reader is None or not all(map(is_, made_of, self._reader_options)):
            self.fetch.collate = self.collate_fn
            reader = self._build_reader(options)
            self._reader, self._reader_options = reader, made_of
        if reader.worker_init_fn is not leave_signals_to_parent:
            return iter(reader)
        with signals_wait():
            return iter(reader)

    def _build_reader(self, options: dict[str, Any]) -> DataLoader[Any]:
        raise NotImplementedError


class SampledLoader(SeededLoader):
    """Loads map-style data in the order that an `EpochSampler` gives.

    Args:
        dataset: the data.
        sampler: gives the indices of each micro-batch.
        collate: makes a batch of a list of samples.
        follows_epoch: give a data set with `set_epoch` the number of each epoch.
        **options: of torch's `DataLoader`.
    """

    def __init__(
        self, dataset: Any, sampler: EpochSampler, collate: Collate, *, follows_epoch: bool, **options: Any
    ) -> None:
        super().__init__(dataset, batch_sampler=sampler, collate_fn=collate, **options)
        self.fetch: MapFetch = MapFetch(dataset, collate)
        self.follows_epoch = follows_epoch

    def _build_reader(self, options: dict[str, Any]) -> DataLoader[Any]:
        return DataLoader(self.fetch, batch_sampler=self.batch_sampler, collate_fn=identity, **options)


class StreamLoader(SeededLoader):
    """Loads iterable data, of which each rank takes its own part of every round.

    Args:
        fetch: reads and collates the rounds.
        **options: of torch's `DataLoader`.
    """

    def __init__(self, fetch: StreamFetch, **options: Any) -> None:
        size, collate = fetch.batch_size, fetch.collate
        super().__init__(fetch.dataset, batch_size=size, collate_fn=collate, drop_last=fetch.drop_last, **options)
        self.fetch: StreamFetch = fetch

    def __len__(self) -> int:
        fetch = self.fetch
        return num_micro_batches(len(fetch.dataset), fetch.per_round, fetch.drop_last)

    def _build_reader(self, options: dict[str, Any]) -> DataLoader[Any]:
        return DataLoader(self.fetch, batch_size=None, collate_fn=identity, **options)
