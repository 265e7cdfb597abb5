"""Find what in data wants to know the number of the epoch."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset, StackDataset, Subset


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
