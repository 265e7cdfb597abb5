"""Divide a loader's batches over the ranks, in rank 0's order, and move each rank's part to its device.

Every sample is used once.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler


class Exchange(Protocol):
    """The methods of a strategy that dividing batches needs."""

    device: torch.device
    rank: int
    world_size: int

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        ...

    def all_reduce_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start to find the largest of each value over all ranks, on the host; the returned function waits."""
        ...


@dataclass(frozen=True)
class RowShare:
    """The number of rows in one micro-batch of each rank.

    Attributes:
        counts: rows of each rank. A rank with none computes with a row of another, which must not count.
    """

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """Rows of all ranks together."""
        return sum(self.counts)

    def weight(self, rank: int) -> float:
        """Return the factor for a rank's mean over its rows, so that the mean over ranks is that over all rows."""
        return self.counts[rank] * len(self.counts) / self.total


def share_of(sizes: list[int], world_size: int) -> RowShare:
    """Divide the rows of `world_size` batches: a batch to each rank, or evenly if some are missing."""
    if len(sizes) == world_size:
        return RowShare(tuple(sizes))
    each, more = divmod(sum(sizes), world_size)
    return RowShare(tuple(each + (rank < more) for rank in range(world_size)))


def rows_of(share: RowShare, rank: int) -> slice:
    """Return the range of a rank's rows among those of all; the last row of all for a rank that has none."""
    begin = sum(share.counts[:rank])
    return slice(begin, begin + share.counts[rank]) if share.counts[rank] else slice(share.total - 1, share.total)


class RankBatches:
    """A batch sampler that gives this rank its rows of each micro-batch.

    Iterating is collective: all ranks use the order of rank 0, however that is drawn.

    Args:
        batch_sampler: gives lists of whole numbers, the batches of one process.
        exchange: the ranks.
        drop_last: skip the last micro-batch if it has fewer batches than there are ranks.
    """

    def __init__(self, batch_sampler: Any, exchange: Exchange, *, drop_last: bool) -> None:
        self._sampler, self._exchange, self._drop_last = batch_sampler, exchange, drop_last
        self._sizes: Rows = []

    def __len__(self) -> int:
        whole, rest = divmod(len(self._sampler), self._exchange.world_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        rows, self._sizes = self._order()
        begin = 0
        for share in self.shares():
            wanted = rows_of(share, self._exchange.rank)
            yield _listed(rows[begin + wanted.start : begin + wanted.stop])
            begin += share.total

    def shares(self) -> Iterator[RowShare]:
        """Yield the shares of the micro-batches in the order that was drawn last."""
        sizes, world_size = self._sizes, self._exchange.world_size
        for start in range(0, len(sizes), world_size):
            group = _listed(sizes[start : start + world_size])
            if len(group) == world_size or not self._drop_last:
                yield share_of(group, world_size)

    def _order(self) -> tuple[Rows, Rows]:
        """Return the rows of rank 0's batches, and the sizes of these. Two all-reduces, of 8 bytes for each."""
        exchange = self._exchange
        if exchange.world_size == 1:
            batches = [list(batch) for batch in self._sampler]
            return list(itertools.chain.from_iterable(batches)), [len(batch) for batch in batches]
        rows, sizes, is_other = array("q"), array("q"), 0  # a list of numbers would take 4 times as much
        for batch in self._sampler if exchange.rank == 0 else ():
            found = list(batch)
            is_other |= not all(isinstance(index, int) for index in found)
            if not is_other:
                rows.extend(found)
                sizes.append(len(found))
        # sync: once an epoch, before its first batch
        num_rows, num_batches, is_other = self._sum(array("q", [len(rows), len(sizes), is_other]), 3).tolist()
        if is_other:
            raise TypeError(
                "the loader's sampler gives something else than whole numbers, which the ranks cannot exchange; give "
                "samples numbers, and look the keys up in the data set"
            )
        both = self._sum(rows + sizes, num_rows + num_batches).cpu()  # sync: as above
        return both[:num_rows], both[num_rows:]

    def _sum(self, values: array[int], size: int) -> torch.Tensor:
        """Return rank 0's numbers on every rank."""
        own = torch.zeros(size, dtype=torch.int64)
        if self._exchange.rank == 0 and size:
            own = torch.frombuffer(values, dtype=torch.int64)
        return self._exchange.sum(own.to(self._exchange.device))


Rows = torch.Tensor | list[Any]
"""Rows of all batches, one after the other; or the sizes of the batches."""


def _listed(part: Rows) -> list[Any]:
    return part.tolist() if isinstance(part, torch.Tensor) else part


@dataclass(frozen=True)
class TakeRows:
    """Collate this rank's rows of a micro-batch that was read in full, with its `RowShare`.

    Attributes:
        collate: makes a batch from rows.
        batch_size: rows of one rank in a full micro-batch.
        rank: of this process.
        world_size: number of processes.
    """

    collate: Callable[[list[Any]], Any]
    batch_size: int
    rank: int
    world_size: int

    def __call__(self, rows: list[Any]) -> tuple[RowShare, Any]:
        """Return the share and this rank's batch."""
        sizes = [self.batch_size] * (len(rows) // self.batch_size)
        if rest := len(rows) % self.batch_size:
            sizes.append(rest)
        share = share_of(sizes, self.world_size)
        return share, self.collate(rows[rows_of(share, self.rank)])


def check_equal_rows(shares: Sequence[RowShare], exchange: Exchange) -> None:
    """Raise on all ranks if they read unequal numbers of rows for a step: ranks with more would wait forever.

    Collective, on the host alone.

    Raises:
        ValueError: the numbers differ.
    """
    if exchange.world_size == 1:
        return
    rows, number = sum(share.total for share in shares), len(shares)
    most_rows, least_rows, most, least = exchange.all_reduce_max([rows, -rows, number, -number])()
    if most_rows != -least_rows or most != -least:
        raise ValueError(
            f"for one step a rank read {-least_rows} rows of the data set in {-least} micro-batches, and another "
            f"{most_rows} in {most}; every rank reads all of a data set that can only be iterated and keeps its own "
            "rows, so have it give the same rows in the same order on each: do not divide it by rank or cut it, and "
            "draw its order from one seed"
        )


class Following(Protocol):
    """The observer of a loader's batches, called before the loop gets each."""

    def begin_loader(self) -> None:
        """Called when a loader begins, perhaps within another."""
        ...

    def begin_batch(self, share: RowShare, *, in_step: int, is_last: bool) -> None:
        """Called when a batch begins."""
        ...

    def end_loader(self) -> None:
        """Called when a loader has given its last batch, or is dropped."""
        ...


class PreparedLoader:
    """A loader whose micro-batches are divided over the ranks.

    A micro-batch consists of as many of the given loader's batches as there are ranks, one for each. The rest at the
    end is divided evenly, in the order of the given loader, so that every sample is used once. The order is that of
    rank 0. Every rank reads all of an iterable data set and collates its own rows; all ranks must read the same rows
    in the same order. If they read unequal numbers, the step in question raises on all ranks.

    Args:
        loader: as for one process.
        exchange: the ranks.
        following: called for each batch.
        steps: micro-batches in a step.

    Raises:
        ValueError: the loader makes no batches, or is divided already.
    """

    def __init__(self, loader: DataLoader[Any], exchange: Exchange, following: Following, steps: int) -> None:
        self._exchange, self._following, self._steps = exchange, following, steps
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._given = loader
        self._loader = _divided_stream(loader, exchange) if self._is_stream else _divided(loader, exchange)

    @property
    def dataset(self) -> Any:
        """The data set."""
        return self._given.dataset

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch's number to every part of the loader that accepts one."""
        for part in (self._given.sampler, self._given.batch_sampler, self._given.dataset):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's batches, on its device. Collective.

        All micro-batches of a step are loaded before the first is yielded, because their number determines its weight.
        """
        batches = self._shared()
        self._following.begin_loader()
        try:
            while step := self._step(batches):
                for number, (share, batch) in enumerate(step, start=1):
                    moved = move(batch, self._exchange.device)
                    self._following.begin_batch(share, in_step=len(step), is_last=number == len(step))
                    yield moved
        finally:
            self._following.end_loader()

    def _step(self, batches: Iterator[tuple[RowShare, Any]]) -> list[tuple[RowShare, Any]]:
        step = list(itertools.islice(batches, self._steps))
        if self._is_stream:
            check_equal_rows([share for share, _ in step], self._exchange)
        return step

    def _shared(self) -> Iterator[tuple[RowShare, Any]]:
        if self._is_stream:
            return iter(self._loader)
        batches = iter(self._loader)  # draws the order
        first = next(batches, _NONE)
        shares = cast("RankBatches", self._loader.batch_sampler).shares()
        return zip(shares, itertools.chain([first], batches)) if first is not _NONE else iter(())  # noqa: B905


_NONE = object()


def move(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if callable(to := getattr(value, "to", None)):  # tensors, and libraries' batches
        return to(device)
    if isinstance(value, Mapping):
        return type(value)({key: move(item, device) for key, item in value.items()})  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move(item, device) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(move(item, device) for item in value)
    return value


def _divided(loader: DataLoader[Any], exchange: Exchange) -> DataLoader[Any]:
    if loader.batch_sampler is None:
        raise ValueError("the loader makes no batches (batch_size=None), so there is nothing to divide; give it a size")
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise ValueError(
                "the loader has a DistributedSampler, which divides the data already; leave it out: give the loader of "
                "one process, with its sampler or shuffle=True"
            )
    drop_last = bool(getattr(loader.batch_sampler, "drop_last", False))
    batches = RankBatches(loader.batch_sampler, exchange, drop_last=drop_last)
    return DataLoader(loader.dataset, batch_sampler=cast("Any", batches), collate_fn=loader.collate_fn, **_kept(loader))


def _divided_stream(loader: DataLoader[Any], exchange: Exchange) -> DataLoader[Any]:
    if loader.batch_size is None:
        raise ValueError("the loader makes no batches (batch_size=None), so there is nothing to divide; give it a size")
    if getattr(loader.dataset, "_distributed", None) is not None:  # of Hugging Face's datasets
        raise ValueError(
            "the data set is divided over ranks already (split_dataset_by_node); leave that out: give all of it to "
            "each rank, which keeps its own rows"
        )
    collate = TakeRows(cast("Any", loader.collate_fn), loader.batch_size, exchange.rank, exchange.world_size)
    size = loader.batch_size * exchange.world_size
    return DataLoader(loader.dataset, batch_size=size, drop_last=loader.drop_last, collate_fn=collate, **_kept(loader))


def _kept(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the options of a loader that are kept."""
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    kept = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        kept |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return kept
