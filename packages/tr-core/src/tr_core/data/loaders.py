"""Build the data loaders of training, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tr_core.data.fetch import Collate, KeepColumns, StreamFetch
from tr_core.data.length_grouping import LengthGrouping, measure_lengths
from tr_core.data.order import EpochSampler
from tr_core.data.own_order import OwnOrderSampler
from tr_core.data.seeded_loaders import SampledLoader, SeededLoader, StreamLoader
from tr_core.data.worker_signals import leave_signals_to_parent, saves_when_told_to_stop
from tr_core.model_io import base_model, kept_columns
from tr_core.protocols import Collectives


def train_loader(
    dataset: Any,
    collate: Collate,
    args: Any,
    collectives: Collectives,
    input_name: str = "input_ids",
    *,
    sampler: Any = None,
) -> SeededLoader:
    """Build the loader of the training data: in the seeded order, or in the data's own if that is asked for.

    Args:
        dataset: the data.
        collate: makes a batch of a list of samples.
        args: the training arguments.
        collectives: who this process is among the others.
        input_name: the sample's entry whose length is measured, where samples are grouped by length.
        sampler: gives another order (see `OwnOrderSampler`); None has the arguments decide.

    Raises:
        ValueError: samples are to be grouped by length, and have none.
    """
    seed = args.seed if args.data_seed is None else args.data_seed
    shuffle = args.train_sampling_strategy != "sequential"
    grouping = None
    if sampler is None and args.train_sampling_strategy == "group_by_length":
        grouping = _grouping(dataset, args, collectives, input_name)
    order = {"seed": seed, "shuffle": shuffle, "grouping": grouping, "own": sampler, "follows_epoch": True}
    return _loader(dataset, collate, args, collectives, args.train_batch_size, **order)


def eval_loader(
    dataset: Any, collate: Collate, args: Any, collectives: Collectives, *, sampler: Any = None
) -> SeededLoader:
    """Build the loader of evaluation data: every sample once, in order; or those that `sampler` gives."""
    order = {"seed": args.seed, "shuffle": False, "own": sampler}
    return _loader(dataset, collate, args, collectives, args.eval_batch_size, **order)


def is_map_style(dataset: Any) -> bool:
    """Whether samples can be read in any order."""
    return has_length(dataset) and not isinstance(dataset, IterableDataset)


def _grouping(dataset: Any, args: Any, collectives: Collectives, input_name: str) -> LengthGrouping:
    if not is_map_style(dataset):
        raise ValueError(
            f"train_sampling_strategy='group_by_length' puts samples into an order, but {type(dataset).__name__} is "
            "iterable data, which has its own; leave train_sampling_strategy out, or give data with __len__ and "
            "__getitem__"
        )
    show = collectives.rank == 0 and not args.disable_tqdm
    lengths = measure_lengths(dataset, args.length_column_name, input_name, show=show)
    return LengthGrouping(lengths, args.train_batch_size * args.gradient_accumulation_steps * collectives.world_size)


def _loader(
    dataset: Any,
    collate: Collate,
    args: Any,
    collectives: Collectives,
    batch_size: int,
    *,
    seed: int,
    shuffle: bool,
    grouping: LengthGrouping | None = None,
    own: Any = None,
    follows_epoch: bool = False,
) -> SeededLoader:
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "a DataLoader was given as a data set, and the Trainer builds its loaders itself; give it the data, "
            "loader.dataset, or return this loader from an override of get_train_dataloader, get_eval_dataloader or "
            "get_test_dataloader"
        )
    drop_last = args.dataloader_drop_last
    ranks: dict[str, Any] = {"rank": collectives.rank, "world_size": collectives.world_size}
    workers = args.dataloader_num_workers
    options: dict[str, Any] = {
        "num_workers": workers,
        # Pinned memory speeds up copies to a device; with none it is a wasted copy.
        "pin_memory": args.dataloader_pin_memory and collectives.device.type == "cuda",
        "persistent_workers": args.dataloader_persistent_workers and workers > 0,
        "prefetch_factor": args.dataloader_prefetch_factor,
        "multiprocessing_context": args.dataloader_multiprocessing_context if workers else None,
        "worker_init_fn": leave_signals_to_parent if workers and saves_when_told_to_stop(args) else None,
        # The loader draws its workers' base seed from here, not from the stream that dropout uses.
        "generator": torch.Generator().manual_seed(seed),
    }
    if is_map_style(dataset):
        if workers and isinstance(collate, KeepColumns) and len(dataset):
            collate.look_ahead(dataset)
        fixed: dict[str, Any] = {"seed": seed, "drop_last": drop_last, **ranks}
        if own is None:
            sampler = EpochSampler(len(dataset), batch_size, shuffle=shuffle, grouping=grouping, **fixed)
        else:
            sampler = OwnOrderSampler(own, batch_size, **fixed)
        return SampledLoader(dataset, sampler, collate, follows_epoch=follows_epoch, **options)
    if own is not None:
        raise ValueError(
            f"{type(own).__name__}, which a sampler method of the Trainer returned, puts samples into an order, but "
            f"{type(dataset).__name__} is iterable data, which has its own; return None for it"
        )
    stream = StreamFetch(dataset, collate, batch_size, seed=seed, drop_last=drop_last, **ranks)
    return StreamLoader(stream, **options)


class KeptLoaders:
    """Loaders whose worker processes live on (`dataloader_persistent_workers`), to be used again."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[tuple[Any, ...], SeededLoader]] = {}

    def get(self, name: Hashable, made_of: tuple[Any, ...], build: Callable[[], SeededLoader]) -> SeededLoader:
        """Return the loader kept under a name if it is made of these very objects, else build it."""
        earlier, kept = self._kept.get(name, ((), None))
        if kept is not None and all(map(is_, earlier, made_of)):
            return kept
        loader = build()
        if loader.persistent_workers:
            self._kept[name] = (made_of, loader)
        return loader


def has_length(dataset: Any) -> bool:
    """Whether a data set knows how many samples it has."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError, NotImplementedError):
        return False


def keeping_columns(collate: Collate, model: nn.Module, label_names: list[str], told: set[frozenset[str]]) -> Collate:
    """Return a collator that hides from `collate` what the model does not take; see `KeepColumns`."""
    columns = kept_columns(model, label_names)
    return collate if columns is None else KeepColumns(collate, columns, type(base_model(model)).__name__, told)
