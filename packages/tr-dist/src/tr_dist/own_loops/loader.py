"""Give each rank its part of a loader's batches, on its device, every sample once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, cast

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from tr_dist.own_loops.batches import Exchange, RankBatches, Share, TakeRows, check_alike


class Following(Protocol):
    """What is told of each batch before the loop gets it."""

    def begin_loader(self) -> None:
        """Note that a loader begins, perhaps within another."""
        ...

    def begin_batch(self, share: Share, *, in_step: int, is_last: bool) -> None:
        """Note that a batch begins."""
        ...

    def end_loader(self) -> None:
        """Note that a loader has given its last batch, or is given up."""
        ...


class PreparedLoader:
    """A loader whose micro-batches are divided over the ranks.

    A micro-batch is as many of the given loader's batches as there are ranks, one for each; what is left at the end is
    divided evenly, in the order of the given loader, so that every sample is used once. The order is that of rank 0.
    A data set that can only be iterated is read whole by every rank, which has to find the same there, and collates
    its own rows. Ranks that find more or fewer rows than others are told so, in the step where that shows.

    Args:
        loader: as for one process.
        exchange: the ranks.
        following: is told of each batch.
        steps: micro-batches in a step.

    Raises:
        ValueError: the loader does not make batches, or is divided already.
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
        """Pass the epoch's number on to whatever in the loader takes one."""
        for part in (self._given.sampler, self._given.batch_sampler, self._given.dataset):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's batches, on its device. Collective.

        All micro-batches of a step are loaded before the first is given, for how many there are decides on its weight.
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

    def _step(self, batches: Iterator[tuple[Share, Any]]) -> list[tuple[Share, Any]]:
        step = list(itertools.islice(batches, self._steps))
        if self._is_stream:
            check_alike([share for share, _ in step], self._exchange)
        return step

    def _shared(self) -> Iterator[tuple[Share, Any]]:
        if self._is_stream:
            return iter(self._loader)
        batches = iter(self._loader)  # draws the order
        first = next(batches, _NONE)
        shares = cast("RankBatches", self._loader.batch_sampler).shares
        return zip(shares, itertools.chain([first], batches)) if first is not _NONE else iter(())  # noqa: B905


_NONE = object()


def move(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if callable(to := getattr(value, "to", None)):  # tensors, and batches of libraries
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
    """Return the options of a loader that stay."""
    names = ("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator")
    kept = {name: getattr(loader, name) for name in names}
    if loader.num_workers:
        kept |= {"prefetch_factor": loader.prefetch_factor, "persistent_workers": loader.persistent_workers}
    return kept
