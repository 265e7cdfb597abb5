"""Divide the batches that a loader makes over the ranks, in rank 0's order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Exchange(Protocol):
    """What of a strategy is needed to divide batches."""

    device: torch.device
    rank: int
    world_size: int

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        ...

    def agree(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begin to find the largest of each value over all ranks, on the host; what is returned waits."""
        ...


@dataclass(frozen=True)
class Share:
    """The rows of one micro-batch: of all ranks together, and of each.

    Attributes:
        counts: rows of each rank. A rank with none computes with a row of another, which must not count.
    """

    counts: tuple[int, ...]

    @property
    def total(self) -> int:
        """Rows of all ranks together."""
        return sum(self.counts)

    def weight(self, rank: int) -> float:
        """Return what to multiply a rank's mean over its rows by, so that the ranks' mean is that over all rows."""
        return self.counts[rank] * len(self.counts) / self.total


def share_of(sizes: list[int], world_size: int) -> Share:
    """Return how the rows of `world_size` batches are divided: a batch to each rank, or evenly if some are missing."""
    if len(sizes) == world_size:
        return Share(tuple(sizes))
    each, more = divmod(sum(sizes), world_size)
    return Share(tuple(each + (rank < more) for rank in range(world_size)))


def rows_of(share: Share, rank: int) -> slice:
    """Return where a rank's rows lie among those of all; the last row of all for a rank that has none."""
    begin = sum(share.counts[:rank])
    return slice(begin, begin + share.counts[rank]) if share.counts[rank] else slice(share.total - 1, share.total)


class RankBatches:
    """A batch sampler that gives this rank its rows of each micro-batch.

    Iterating is collective: rank 0 lists its order, whatever it is drawn from, and all ranks take it.

    Args:
        batch_sampler: gives lists of whole numbers, the batches of one process.
        exchange: the ranks.
        drop_last: leave out the last micro-batch if it has fewer batches than there are ranks.
    """

    def __init__(self, batch_sampler: Any, exchange: Exchange, *, drop_last: bool) -> None:
        self._sampler, self._exchange, self._drop_last = batch_sampler, exchange, drop_last
        self.shares: list[Share] = []

    def __len__(self) -> int:
        whole, rest = divmod(len(self._sampler), self._exchange.world_size)
        return whole + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._order()
        world_size, rank = self._exchange.world_size, self._exchange.rank
        groups = [batches[start : start + world_size] for start in range(0, len(batches), world_size)]
        if self._drop_last and groups and len(groups[-1]) < world_size:
            groups.pop()
        self.shares = [share_of([len(batch) for batch in group], world_size) for group in groups]
        for group, share in zip(groups, list(self.shares), strict=True):
            yield list(itertools.chain.from_iterable(group))[rows_of(share, rank)]

    def _order(self) -> list[list[int]]:
        """Return the batches of rank 0. Two sums, of 8 bytes for each sample and each batch."""
        exchange = self._exchange
        batches = [list(batch) for batch in self._sampler] if exchange.rank == 0 else []
        if exchange.world_size == 1:
            return batches
        flat = [index for batch in batches for index in batch]
        is_numbers = all(isinstance(index, int) for index in flat)
        sizes = [len(flat), len(batches), int(not is_numbers)]
        # sync: once an epoch, before its first batch
        num_rows, num_batches, is_other = exchange.sum(self._tensor(sizes, 3)).tolist()
        if is_other:
            raise TypeError(
                "the loader's sampler gives something else than whole numbers, which the ranks cannot exchange; give "
                "samples numbers, and look the keys up in the data set"
            )
        own = [*flat, *map(len, batches)] if exchange.rank == 0 else []
        found = exchange.sum(self._tensor(own, num_rows + num_batches)).tolist()  # sync: as above
        rows = iter(found[:num_rows])
        return [list(itertools.islice(rows, size)) for size in found[num_rows:]]

    def _tensor(self, values: list[int], size: int) -> torch.Tensor:
        """Return rank 0's numbers; zeros on the others."""
        device = self._exchange.device
        if self._exchange.rank:
            return torch.zeros(size, dtype=torch.int64, device=device)
        return torch.tensor(values, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class TakeRows:
    """Collate this rank's rows of a micro-batch that was read whole, and say how it was divided.

    Attributes:
        collate: makes a batch of rows.
        batch_size: rows of one rank in a full micro-batch.
        rank: of this process.
        world_size: number of processes.
    """

    collate: Callable[[list[Any]], Any]
    batch_size: int
    rank: int
    world_size: int

    def __call__(self, rows: list[Any]) -> tuple[Share, Any]:
        """Return the share and this rank's batch."""
        sizes = [self.batch_size] * (len(rows) // self.batch_size)
        if rest := len(rows) % self.batch_size:
            sizes.append(rest)
        share = share_of(sizes, self.world_size)
        return share, self.collate(rows[rows_of(share, self.rank)])


def check_alike(shares: Sequence[Share], exchange: Exchange) -> None:
    """Raise on all ranks if they did not read equally many rows for a step: the others would wait for one that ended.

    Collective, on the host alone.

    Raises:
        ValueError: they read different numbers.
    """
    if exchange.world_size == 1:
        return
    rows, number = sum(share.total for share in shares), len(shares)
    most_rows, least_rows, most, least = exchange.agree([rows, -rows, number, -number])()
    if most_rows != -least_rows or most != -least:
        raise ValueError(
            f"for one step a rank read {-least_rows} rows of the data set in {-least} micro-batches, and another "
            f"{most_rows} in {most}; every rank reads all of a data set that can only be iterated and keeps its own "
            "rows, so have it give the same rows in the same order on each: do not divide it by rank or cut it, and "
            "draw its order from one seed"
        )
