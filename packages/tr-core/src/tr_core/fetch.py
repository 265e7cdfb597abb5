"""Load the samples of one micro-batch and collate them, with random numbers that depend on nothing but its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count, islice
from typing import Any, NamedTuple

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from tr_core.order import Batch, take_slice
from tr_core.randomness import mix, put_back, seed_host_generators, separate_randomness, set_aside

Collate = Callable[[list[Any]], Any]


def identity(batch: Any) -> Any:
    """Return what it is given: batches leave the data set already collated."""
    return batch


class KeepColumns:
    """A collator that first drops what the model does not take from samples that are mappings.

    Args:
        collate: the collator that gets what is left.
        columns: keys to keep.
        model_name: class name of the model, for messages.

    Raises:
        ValueError: when called, if nothing is left, or if the collator misses a dropped key; the message names it.
    """

    def __init__(self, collate: Collate, columns: list[str], model_name: str) -> None:
        self._collate, self._columns, self._model_name = collate, frozenset(columns), model_name

    def __call__(self, samples: list[Any]) -> Any:
        """Collate the samples without the keys that the model does not take."""
        if not isinstance(samples[0], Mapping):
            return self._collate(samples)
        columns = self._columns
        if samples[0].keys() <= columns:
            return self._collate(samples)
        kept = [{key: value for key, value in sample.items() if key in columns} for sample in samples]
        if not kept[0]:
            raise ValueError(self._explain(samples[0], "no column is left"))
        try:
            return self._collate(kept)
        except KeyError as error:
            if error.args and error.args[0] in set(samples[0]) - columns:
                raise ValueError(self._explain(samples[0], f"the data collator asks for {error.args[0]!r}")) from error
            raise

    def _explain(self, sample: Mapping[str, Any], problem: str) -> str:
        dropped = sorted(set(sample) - self._columns)
        return (
            f"{problem} after dropping {dropped}, which the forward of {self._model_name} does not take (it takes "
            f"{sorted(self._columns)}); pass remove_unused_columns=False to keep all columns"
        )


class MapFetch(Dataset[Any]):
    """A map-style data set whose item is a whole collated micro-batch.

    Args:
        dataset: what the samples come from; its `__getitems__` is used where it has one.
        collate: makes a batch of a list of samples.
    """

    def __init__(self, dataset: Any, collate: Collate) -> None:
        self.dataset, self.collate = dataset, collate
        self._get_many = getattr(dataset, "__getitems__", self._get_each)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one sample, as the wrapped data set gives it."""
        return self.dataset[index]

    def __getitems__(self, indices: Batch) -> Any:
        """Return the collated batch of `indices`."""
        if get_worker_info() is not None:
            seed_host_generators(indices.seed)  # a worker's generators serve nothing else
            return self.collate(self._get_many(indices))
        aside = set_aside(indices.seed)
        try:
            return self.collate(self._get_many(indices))
        finally:
            put_back(aside)

    def _get_each(self, indices: list[int]) -> list[Any]:
        return list(map(self.dataset.__getitem__, indices))

    def __getstate__(self) -> dict[str, Any]:
        """Travel to worker processes without the bound method."""
        return {"dataset": self.dataset, "collate": self.collate}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Arrive in a worker process."""
        self.__init__(**state)


class Round(NamedTuple):
    """What a stream gives at a time.

    Attributes:
        inputs: this rank's collated batch; None for a round passed over.
        total: samples that the round holds for all ranks.
    """

    inputs: Any
    total: int


class StreamFetch(IterableDataset[Any]):
    """An iterable data set that gives whole collated micro-batches, of which each rank takes its own.

    The stream is cut into rounds of `batch_size * world_size` samples, one slice for each rank. With worker processes
    the data set must divide itself among them (`torch.utils.data.get_worker_info`), as torch requires.

    Args:
        dataset: what the samples come from, the same stream on every rank.
        collate: makes a batch of a list of samples.
        batch_size: samples per rank and micro-batch.
        seed: seed of what is drawn while loading.
        drop_last: leave out a short last round.
        rank: this process's number.
        world_size: number of processes.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        batch_size: int,
        *,
        seed: int,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.dataset, self.collate, self.batch_size = dataset, collate, batch_size
        self.seed, self.drop_last, self.rank, self.world_size = seed, drop_last, rank, world_size
        self.epoch, self.skipped_rounds, self.skipped_samples = 0, 0, 0

    @property
    def per_round(self) -> int:
        """Samples that all ranks together take at a time."""
        return self.batch_size * self.world_size

    def seek(self, epoch: int, position: int = 0) -> int:
        """Make the next iteration begin after `position` samples of all ranks.

        Nothing is known about the stream, so what comes before is read again and thrown away uncollated.

        Returns:
            How many rounds the next iteration gives without a batch, for those passed over.
        """
        self.epoch = epoch
        self.skipped_rounds, self.skipped_samples = divmod(position, self.per_round)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return self.skipped_rounds

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if parts > 1 and self.skipped_samples:
            raise ValueError(
                f"cannot go on {self.skipped_samples} samples into a micro-batch of {self.per_round} with {parts} "
                "workers; resume iterable data with the batch size it was saved with, or dataloader_num_workers=0"
            )
        samples = iter(self.dataset)
        next(islice(samples, self.skipped_samples, self.skipped_samples), None)
        for number in count(part, parts):
            # Round `number` of all workers together: the loader takes one from each worker in turn.
            seed = mix(self.seed, self.epoch, self.skipped_samples + number * self.per_round)
            with _randomness(seed):
                read = list(islice(samples, self.per_round))
                if not read or (self.drop_last and len(read) < self.per_round):
                    return
                batch = self._collate_mine(read) if number >= self.skipped_rounds else None
            yield Round(batch, len(read))

    def _collate_mine(self, read: list[Any]) -> Any:
        share = take_slice(0, 0, len(read), self.batch_size, self.rank, self.world_size)
        return self.collate(read[share.start : share.stop])


def _randomness(seed: int) -> AbstractContextManager[None]:
    if get_worker_info() is None:
        return separate_randomness(seed)
    seed_host_generators(seed)  # a worker's generators serve nothing else
    return nullcontext()
