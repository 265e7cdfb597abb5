"""Load the samples of one micro-batch and collate them."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, get_worker_info

from tr_core.collators.padding import default_data_collator
from tr_core.data.columns import NarrowedSample, required_columns
from tr_core.data.sampler import Batch, take_slice
from tr_core.model_io import to_plain
from tr_core.random_state import derive_seed, restore_rng, seed_host_generators, separate_randomness, swap_rng
from tr_log import get_logger

DATA_ERRORS = (Exception, GeneratorExit)
"""Exceptions of a data set or a collator that get an explanation."""


def explain_data_error(error: BaseException, what: str, owner: Any, where: str) -> None:
    """Add the samples to an error as a note; call it in the handler and `raise` afterwards.

    Type and traceback stay. Notes are part of a formatted traceback, so they also survive the transfer from a worker
    process. StopIteration and GeneratorExit, which would silently end the data, become a RuntimeError.
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
# Values that are stacked without running code of their own.
_PLAIN = {torch.Tensor, np.ndarray, list, int, float, bool, str, type(None)}
logger = get_logger("tr_core.data.fetch")


def identity(batch: Any) -> Any:
    """Return the batch unchanged: batches leave the data set already collated."""
    return batch


class KeepColumns:
    """A collator that first hides the columns that the model does not take, in samples that are mappings.

    The first time a column is hidden, it is logged.

    Args:
        collate: the collator that gets the narrowed samples. Columns in its attribute `required_columns` stay visible.
        logged: sets of hidden columns that were logged already; new ones are added.

    Raises:
        ValueError: in a call, if no column is visible and the collator accessed no hidden one.
    """

    def __init__(
        self, collate: Collate, columns: Collection[str], model_name: str, logged: set[frozenset[str]] | None = None
    ) -> None:
        self.inner, self._columns, self._model_name = collate, sorted(set(columns)), model_name
        self._shown = frozenset(columns) | required_columns(collate)
        self._logged = set() if logged is None else logged
        self.__qualname__ = getattr(collate, "__qualname__", type(collate).__name__)  # its name in errors

    def __call__(self, samples: list[Any]) -> Any:
        """Collate the samples without the columns that the model does not take."""
        if not isinstance(samples[0], Mapping) or all(map(self._shown.issuperset, samples)):
            return self.inner(samples)
        self._log_hidden(samples[0])
        asked: set[str] = set()
        narrowed = [NarrowedSample(sample, self._shown, asked) for sample in samples]
        if any(narrowed):
            return self.inner(narrowed)
        try:
            batch = self.inner(narrowed)
        except Exception as error:
            if asked:
                raise
            raise ValueError(self._nothing_left(samples[0])) from error
        if not asked:
            raise ValueError(self._nothing_left(samples[0]))
        return batch

    def look_ahead(self, dataset: Any) -> None:
        """Log the columns that will be hidden, so that worker processes do not log them in every epoch."""
        with separate_randomness(0):
            sample = dataset[0]
        if isinstance(sample, Mapping):
            self._log_hidden(sample)

    def _log_hidden(self, columns: Collection[str]) -> None:
        worker = get_worker_info()
        hidden = frozenset(columns) - self._shown
        if hidden in self._logged or not hidden or (worker is not None and worker.id > 0):
            return
        self._logged.add(hidden)
        logger.info(
            "columns %s of the data are not arguments of the forward method of %s and are not passed to it; a data "
            "collator that asks for one by name gets it, and remove_unused_columns=False keeps them all",
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
    """A map-style data set whose item is a whole collated micro-batch."""

    def __init__(self, dataset: Any, collate: Collate, epoch: int | None = None) -> None:
        self.dataset, self.collate, self.epoch = dataset, collate, epoch
        self._get_many = getattr(dataset, "__getitems__", None)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one sample of the wrapped data set."""
        return self.dataset[index]

    def set_epoch(self, epoch: int) -> None:
        """Pass the number of the epoch to the data set, if it has `set_epoch`."""
        self.epoch = epoch
        for listener in epoch_listeners(self.dataset):
            listener.set_epoch(epoch)

    def __getitems__(self, indices: Batch) -> Any:
        """Return the collated batch of `indices`."""
        if indices.epoch is not None and indices.epoch != self.epoch:
            self.set_epoch(indices.epoch)  # the copy in a persistent worker process
        if get_worker_info() is not None:
            seed_host_generators(indices.seed)  # a worker's generators serve nothing else
            return self._collated(self._samples(indices), indices)
        if (samples := self._plain_samples(indices)) is not None:
            return self._collated(samples, indices)
        aside = swap_rng(indices.seed)
        try:
            return self._collated(self._samples(indices), indices)
        finally:
            restore_rng(aside)

    def _plain_samples(self, indices: Batch) -> list[Any] | None:
        """Return the samples if loading them runs no code that could draw random numbers, else None.

        It is so for lists of plain dicts, stacked by the default collator. Setting the generators aside for them would
        cost more than the batch itself.
        """
        collate, dataset = self.collate, self.dataset
        inner = collate.inner if isinstance(collate, KeepColumns) else collate
        if inner is not default_data_collator or type(dataset) is not list:
            return None
        try:
            samples = list(map(dataset.__getitem__, indices))
        except IndexError:
            return None  # it gets its explanation where samples of any kind are read
        if not {dict}.issuperset(map(type, samples)):
            return None
        return samples if _PLAIN.issuperset(map(type, chain.from_iterable(map(dict.values, samples)))) else None

    def _samples(self, indices: Batch) -> Any:
        samples, index = [], None
        try:
            if self._get_many is not None:
                return self._get_many(indices)
            for index in indices:
                samples.append(self.dataset[index])
        except DATA_ERRORS as error:
            which = f"samples {list(indices)}" if index is None else f"sample {index}"
            explain_data_error(error, "the data set", self.dataset, which)
            raise
        return samples

    def _collated(self, samples: Any, indices: Batch) -> Any:
        try:
            return self.collate(samples)
        except DATA_ERRORS as error:
            explain_data_error(error, "the data collator", self.collate, f"samples {list(indices)}")
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the bound method."""
        return {"dataset": self.dataset, "collate": self.collate, "epoch": self.epoch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle in a worker process."""
        self.__init__(**state)


class Round(NamedTuple):
    """One item of a stream.

    Attributes:
        total: samples that the round holds for all ranks.
        content: a number of what its samples hold, where ranks compare it: in the first round of several ranks.
    """

    inputs: Any
    total: int
    content: int = 0


class StreamFetch(IterableDataset[Any]):
    """An iterable data set that yields whole collated micro-batches; each rank takes its own part.

    The stream is cut into rounds of `batch_size * world_size` samples, one slice for each rank. With worker processes
    the data set must divide itself among them (`torch.utils.data.get_worker_info`); torch requires it.
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
        # Epoch, rounds and samples to skip, and whether the data set starts at the position by its own state. They are
        # in memory shared with worker processes: persistent workers have a copy of all else from their start.
        self._place = torch.zeros(4, dtype=torch.int64).share_memory_()

    @property
    def per_round(self) -> int:
        """Samples of one round of all ranks."""
        return self.batch_size * self.world_size

    def seek(self, epoch: int, position: int = 0, *, rounds: int | None = None, is_there: bool = False) -> int:
        """Make the next iteration begin after `position` samples of all ranks.

        A stream has no random access: the samples before the position are read and dropped uncollated. Returns the
        number of rounds that the next iteration yields without a batch. `rounds` counts the skipped ones, None if all
        are whole. With `is_there` the data set itself begins at the position.
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
            # Round `number` over all workers: the loader takes one from each worker in turn.
            seed = derive_seed(self.seed, epoch, skipped_samples + number * self.per_round)
            with _randomness(seed):
                read = reader.read(self.per_round)
                if not read or (self.drop_last and len(read) < self.per_round):
                    return
                batch = reader.collate(read) if number >= skipped_rounds else None
            is_first = skipped_rounds <= number < skipped_rounds + parts
            yield Round(batch, len(read), content_of(read) if is_first and self.world_size > 1 else 0)


def content_of(samples: list[Any]) -> int:
    """Return a number of the first and the last sample: of the texts, numbers, arrays and tensors in them."""
    ends = [to_plain(sample, lambda value: type(value).__name__) for sample in (samples[0], samples[-1])]
    return zlib.crc32(repr(ends).encode("utf-8", "surrogatepass"))


class _Reader:
    """Reads and collates samples of a stream, and adds their positions to errors."""

    def __init__(self, fetch: StreamFetch, position: int, of: str) -> None:
        self._fetch, self._position, self._of = fetch, position, of
        self._samples = self._guarded(lambda: iter(fetch.dataset), [])

    def read(self, number: int) -> list[Any]:
        """Return the next samples, fewer at the end of the stream."""
        read: list[Any] = []  # samples before an error
        self._guarded(lambda: read.extend(islice(self._samples, number)), read)
        self._position += len(read)
        return read

    def collate(self, read: list[Any]) -> Any:
        """Return this rank's batch of the given samples."""
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
