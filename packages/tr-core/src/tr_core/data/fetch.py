"""Load the samples of one micro-batch and collate them.

Their random numbers depend on the position alone. An error that the data set or the collator raises says at which
samples. Data sets that define `set_epoch` are found here, and receive the number of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, get_worker_info

from tr_core.data.columns import NarrowedSample, required_columns
from tr_core.data.sampler import Batch, take_slice
from tr_core.random_state import derive_seed, restore_rng, seed_host_generators, separate_randomness, swap_rng
from tr_log import get_logger

DATA_ERRORS = (Exception, GeneratorExit)
"""What a data set or a collator may raise that is to be explained."""


def explain_data_error(error: BaseException, what: str, owner: Any, where: str) -> None:
    """Note in an error where it was raised; to be called where it is handled, and followed by `raise`.

    Type and traceback stay. Notes are part of a formatted traceback, so they come back from a worker process too.

    Args:
        error: what was raised.
        what: `the data set` or `the data collator`.
        owner: which one.
        where: the samples.

    Raises:
        RuntimeError: it was StopIteration or GeneratorExit, which would end the data in silence.
    """
    name = getattr(owner, "__qualname__", None) or type(owner).__name__
    if isinstance(error, StopIteration | GeneratorExit):
        raise RuntimeError(
            f"{what} {name} raised {type(error).__name__} for {where}, which ends a loop over the data and would leave "
            "samples out; raise another error, such as IndexError, or return the sample"
        ) from error
    error.add_note(f"raised by {what} {name} for {where}")


def epoch_listeners(dataset: Any) -> list[Any]:
    """Return the objects with `set_epoch`: the data set itself, or those inside torch's wrappers of data sets."""
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset]
    inner: list[Any] = []
    if isinstance(dataset, Subset):
        inner = [dataset.dataset]
    elif isinstance(dataset, ConcatDataset):
        inner = list(dataset.datasets)
    elif isinstance(dataset, StackDataset):
        inner = list(dataset.datasets.values() if isinstance(dataset.datasets, dict) else dataset.datasets)
    found = {id(listener): listener for part in inner for listener in epoch_listeners(part)}
    return list(found.values())


Collate = Callable[[list[Any]], Any]
logger = get_logger("tr_core.data.fetch")


def identity(batch: Any) -> Any:
    """Return what it is given: batches leave the data set already collated."""
    return batch


class KeepColumns:
    """A collator that first hides what the model does not take from samples that are mappings.

    The first time something is hidden, a line in the log names it.

    Args:
        collate: the collator that gets the narrowed samples. Columns that it lists in an attribute
            `required_columns` stay in sight.
        columns: names of the columns that the model takes.
        model_name: class name of the model, for messages.
        told: sets of hidden columns that were named in the log already; more are added.

    Raises:
        ValueError: when called, if no column is in sight and the collator asked for none of the hidden ones.
    """

    def __init__(
        self, collate: Collate, columns: Collection[str], model_name: str, told: set[frozenset[str]] | None = None
    ) -> None:
        self._collate, self._columns, self._model_name = collate, sorted(set(columns)), model_name
        self._shown = frozenset(columns) | required_columns(collate)
        self._told = set() if told is None else told
        self.__qualname__ = getattr(collate, "__qualname__", type(collate).__name__)  # its name in errors

    def __call__(self, samples: list[Any]) -> Any:
        """Collate the samples without the columns that the model does not take."""
        if not isinstance(samples[0], Mapping) or all(map(self._shown.issuperset, samples)):
            return self._collate(samples)
        self._tell(samples[0])
        asked: set[str] = set()
        narrowed = [NarrowedSample(sample, self._shown, asked) for sample in samples]
        if any(narrowed):
            return self._collate(narrowed)
        try:
            batch = self._collate(narrowed)
        except Exception as error:
            if asked:
                raise
            raise ValueError(self._nothing_left(samples[0])) from error
        if not asked:
            raise ValueError(self._nothing_left(samples[0]))
        return batch

    def look_ahead(self, dataset: Any) -> None:
        """Name what will be hidden of map-style data that worker processes load: in every pass they would say it."""
        with separate_randomness(0):
            sample = dataset[0]
        if isinstance(sample, Mapping):
            self._tell(sample)

    def _tell(self, columns: Collection[str]) -> None:
        worker = get_worker_info()
        hidden = frozenset(columns) - self._shown
        if hidden in self._told or not hidden or (worker is not None and worker.id > 0):
            return
        self._told.add(hidden)
        logger.info(
            "columns %s of the data are no arguments of the forward of %s and are not given to it; a data collator "
            "that asks for one by name gets it, and remove_unused_columns=False keeps them all",
            sorted(hidden),
            self._model_name,
        )

    def _nothing_left(self, sample: Mapping[str, Any]) -> str:
        return (
            f"no column of the data is left: it has {sorted(sample)}, the forward of {self._model_name} takes "
            f"{self._columns}, and the data collator asks for none by name. Rename columns to what the forward takes, "
            "or pass remove_unused_columns=False and a data_collator that makes the model's inputs of them"
        )


class MapFetch(Dataset[Any]):
    """A map-style data set whose item is a whole collated micro-batch.

    Args:
        dataset: what the samples come from; its `__getitems__` is used where it has one.
        collate: makes a batch of a list of samples.

    Attributes:
        epoch: what the data set was last given by `set_epoch`, None before that.
    """

    def __init__(self, dataset: Any, collate: Collate, epoch: int | None = None) -> None:
        self.dataset, self.collate, self.epoch = dataset, collate, epoch
        self._get_many = getattr(dataset, "__getitems__", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one sample, as the wrapped data set gives it."""
        return self.dataset[index]

    def set_epoch(self, epoch: int) -> None:
        """Give the data set the number of the epoch, where it takes one."""
        self.epoch = epoch
        for listener in epoch_listeners(self.dataset):
            listener.set_epoch(epoch)

    def __getitems__(self, indices: Batch) -> Any:
        """Return the collated batch of `indices`."""
        if indices.epoch is not None and indices.epoch != self.epoch:
            self.set_epoch(indices.epoch)  # the copy of a worker process that lives through several epochs
        aside = None
        if get_worker_info() is None:
            aside = swap_rng(indices.seed)
        else:
            seed_host_generators(indices.seed)  # a worker's generators serve nothing else
        try:
            samples, index = [], None
            try:
                if self._get_many is not None:
                    samples = self._get_many(indices)
                else:
                    for index in indices:
                        samples.append(self.dataset[index])
            except DATA_ERRORS as error:
                which = f"samples {list(indices)}" if index is None else f"sample {index}"
                explain_data_error(error, "the data set", self.dataset, which)
                raise
            try:
                return self.collate(samples)
            except DATA_ERRORS as error:
                explain_data_error(error, "the data collator", self.collate, f"samples {list(indices)}")
                raise
        finally:
            if aside is not None:
                restore_rng(aside)

    def __getstate__(self) -> dict[str, Any]:
        """Travel to worker processes without the bound method."""
        return {"dataset": self.dataset, "collate": self.collate, "epoch": self.epoch}

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
        # Epoch, rounds and samples to pass over, and whether the data is there already, in memory shared with worker
        # processes: those that live through several passes have a copy of everything else from when they were started.
        self._place = torch.zeros(4, dtype=torch.int64).share_memory_()

    @property
    def per_round(self) -> int:
        """Samples that all ranks together take at a time."""
        return self.batch_size * self.world_size

    def seek(self, epoch: int, position: int = 0, *, rounds: int | None = None, is_there: bool = False) -> int:
        """Make the next iteration begin after `position` samples of all ranks.

        Nothing is known about the stream, so what comes before is read again and thrown away uncollated.

        Args:
            epoch: the pass, from 0.
            position: samples of all ranks to pass over.
            rounds: how many rounds those are, short ones among them; None takes all of them to be whole.
            is_there: the data set itself begins at that place, so that nothing is to be read before it.

        Returns:
            How many rounds the next iteration gives without a batch, for those passed over.
        """
        whole, samples = divmod(position, self.per_round)
        if rounds is not None:
            whole, samples = rounds, 0
        rounds = whole
        self._place.copy_(torch.tensor([epoch, rounds, samples, is_there]))
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return rounds

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        part, parts = (0, 1) if worker is None else (worker.id, worker.num_workers)
        epoch, skipped_rounds, skipped_samples, is_there = self._place.tolist()
        if parts > 1 and skipped_samples:
            raise ValueError(
                f"cannot go on {skipped_samples} samples into a micro-batch of {self.per_round} with {parts} "
                "workers; resume iterable data with the batch size it was saved with, or dataloader_num_workers=0"
            )
        if worker is not None and hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        position = skipped_samples + skipped_rounds * self.per_round if is_there else 0
        reader = _Reader(self, position, "" if worker is None else f" of worker {part}'s own part")
        if not is_there:
            reader.read(skipped_samples)
        for number in count(skipped_rounds if is_there else part, parts):
            # Round `number` of all workers together: the loader takes one from each worker in turn.
            seed = derive_seed(self.seed, epoch, skipped_samples + number * self.per_round)
            with _randomness(seed):
                read = reader.read(self.per_round)
                if not read or (self.drop_last and len(read) < self.per_round):
                    return
                batch = reader.collate(read) if number >= skipped_rounds else None
            yield Round(batch, len(read))


class _Reader:
    """Reads and collates samples of a stream, and notes in errors which they were.

    Args:
        fetch: whose data set is read.
        position: number of the first sample, from 0 in the epoch.
        of: words on what the positions are of, after them.
    """

    def __init__(self, fetch: StreamFetch, position: int, of: str) -> None:
        self._fetch, self._position, self._of = fetch, position, of
        self._samples = self._guarded(lambda: iter(fetch.dataset), [])

    def read(self, number: int) -> list[Any]:
        """Return the next samples, fewer at the end of the stream."""
        read: list[Any] = []  # holds what came before an error
        self._guarded(lambda: read.extend(islice(self._samples, number)), read)
        self._position += len(read)
        return read

    def collate(self, read: list[Any]) -> Any:
        """Return this rank's batch of the samples that were read last."""
        fetch = self._fetch
        share = take_slice(0, 0, len(read), fetch.batch_size, fetch.rank, fetch.world_size)
        try:
            return fetch.collate(read[share.start : share.stop])
        except DATA_ERRORS as error:
            first = self._position - len(read)
            where = f"samples {first + share.start} to {first + share.stop - 1} of the stream{self._of}"
            explain_data_error(error, "the data collator", fetch.collate, where)
            raise

    def _guarded(self, act: Callable[[], Any], read: list[Any]) -> Any:
        try:
            return act()
        except DATA_ERRORS as error:
            where = f"sample {self._position + len(read)} of the stream{self._of}"
            explain_data_error(error, "the data set", self._fetch.dataset, where)
            raise


def _randomness(seed: int) -> AbstractContextManager[None]:
    if get_worker_info() is None:
        return separate_randomness(seed)
    seed_host_generators(seed)  # a worker's generators serve nothing else
    return nullcontext()
