"""Stack samples into a batch, as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from tr_core.collators.rows import refuse_words


def default_data_collator(features: list[Any]) -> Any:
    """Stack samples that are mappings, or objects with attributes, into a dict of tensors.

    The key `label` (one number a sample) or `label_ids` (one or a row of numbers) becomes `labels`: int64 for whole
    numbers, else float32. None and strings are left out, but a label that is a string is refused. Samples of any other
    kind (tuples, tensors) are stacked as torch's own `default_collate` does.

    Args:
        features: the samples; all have the keys of the first.

    Raises:
        ValueError: a label is a string, or rows of unequal length cannot be stacked.
    """
    first = features[0]
    if isinstance(first, tuple | list | torch.Tensor | np.ndarray | int | float):
        return default_collate(features)
    if not isinstance(first, Mapping):
        features = [vars(feature) for feature in features]
        first = features[0]
    batch: dict[str, torch.Tensor] = {}
    for key, value in first.items():
        if value is None or isinstance(value, str):
            if value is not None:
                refuse_words(first)
            continue
        values = list(map(itemgetter(key), features))
        if key == "label" or (key == "label_ids" and first.get("label") is None):
            batch["labels"] = _labels(values)
        elif key != "label_ids":
            batch[key] = torch.stack(values) if isinstance(value, torch.Tensor) else _stack(key, values)
    return batch


def _labels(values: list[Any]) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    labels = torch.as_tensor(np.asarray(values))
    return labels.float() if labels.is_floating_point() else labels.long()


def _stack(key: str, values: list[Any]) -> torch.Tensor:
    try:
        if isinstance(values[0], np.ndarray):
            return torch.from_numpy(np.stack(values))
        return torch.tensor(values)
    except ValueError as error:
        lengths = sorted({len(value) for value in values if isinstance(value, Sized)})
        if len(lengths) < 2:
            raise
        raise ValueError(
            f"{key!r} has rows of {lengths[0]} to {lengths[-1]} values, which cannot be stacked; give the Trainer the "
            "tokenizer as processing_class or a data_collator that pads, or make the rows of one length"
        ) from error
