"""Build the data loaders of training, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tr_core.fetch import Collate, KeepColumns, MapFetch, StreamFetch, identity
from tr_core.model_io import base_model, kept_columns
from tr_core.order import EpochSampler
from tr_core.protocols import Collectives


def train_loader(dataset: Any, collate: Collate, args: Any, collectives: Collectives) -> DataLoader[Any]:
    """Build the loader of the training data: in the seeded order, or in the data's own if that is asked for."""
    seed = args.seed if args.data_seed is None else args.data_seed
    shuffle = args.train_sampling_strategy != "sequential"
    return _loader(dataset, collate, args, collectives, args.train_batch_size, seed=seed, shuffle=shuffle)


def eval_loader(dataset: Any, collate: Collate, args: Any, collectives: Collectives) -> DataLoader[Any]:
    """Build the loader of evaluation data: every sample once, in order."""
    return _loader(dataset, collate, args, collectives, args.eval_batch_size, seed=args.seed, shuffle=False)


def _loader(
    dataset: Any,
    collate: Collate,
    args: Any,
    collectives: Collectives,
    batch_size: int,
    *,
    seed: int,
    shuffle: bool,
) -> DataLoader[Any]:
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
        "collate_fn": identity,
        # The loader draws its workers' base seed from here, not from the stream that dropout uses.
        "generator": torch.Generator().manual_seed(seed),
    }
    if has_length(dataset) and not isinstance(dataset, IterableDataset):
        sampler = EpochSampler(len(dataset), batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last, **ranks)
        return DataLoader(MapFetch(dataset, collate), batch_sampler=sampler, **options)
    stream = StreamFetch(dataset, collate, batch_size, seed=seed, drop_last=drop_last, **ranks)
    return DataLoader(stream, batch_size=None, **options)


def has_length(dataset: Any) -> bool:
    """Whether a data set knows how many samples it has."""
    try:
        return len(dataset) is not None
    except (TypeError, AttributeError, NotImplementedError):
        return False


def keeping_columns(collate: Callable[[list[Any]], Any], model: nn.Module, label_names: list[str]) -> Collate:
    """Return a collator that drops what the model does not take before it collates."""
    columns = kept_columns(model, label_names)
    return collate if columns is None else KeepColumns(collate, columns, type(base_model(model)).__name__)
