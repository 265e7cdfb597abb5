"""Bring rows of different lengths to one, with a tokenizer or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

IGNORED_LABEL = -100


def pad_with(tokenizer: Any, features: Sequence[Any], **options: Any) -> dict[str, Any]:
    """Pad samples with `tokenizer.pad` and return the batch as torch tensors.

    Tokenizers of transformers note once that calling them pads faster than `pad` does; a collator has no such choice,
    so the note is kept back.

    Args:
        tokenizer: an object whose `pad(samples, padding=, max_length=, pad_to_multiple_of=, return_tensors="pt")`
            pads, as those of transformers do.
        features: samples of token ids, and what goes with them.
        options: arguments of `pad`.
    """
    notices, key = getattr(tokenizer, "deprecation_warnings", {}), "Asking-to-pad-a-fast-tokenizer"
    before = notices.get(key, False)
    notices[key] = True
    try:
        return dict(tokenizer.pad(features, return_tensors="pt", **options))
    finally:
        notices[key] = before


def pad_rows(
    rows: Sequence[Any], value: int, *, width: int | None = None, multiple: int | None = None, side: str = "right"
) -> torch.Tensor:
    """Return rows of whole numbers as one int64 tensor of shape (rows, width).

    Args:
        rows: lists, arrays or tensors of one dimension, or of two where those are alike.
        value: what fills the rows.
        width: the length to fill up to; None is that of the longest row.
        multiple: make the width a multiple of this.
        side: where to fill: `right` or `left`.

    Raises:
        ValueError: a row is longer than the width.
    """
    tensors = [torch.as_tensor(row, dtype=torch.int64) for row in rows]
    longest = max(map(len, tensors))
    width = longest if width is None else width
    if longest > width:
        number = next(i for i, row in enumerate(tensors) if len(row) > width)
        raise ValueError(f"sample {number} of the batch has {len(tensors[number])} values where {width} fit")
    if multiple:
        width = -(-width // multiple) * multiple
    padded = torch.full((len(tensors), width, *tensors[0].shape[1:]), value, dtype=torch.int64)
    for place, row in zip(padded, tensors, strict=True):
        begin = width - len(row) if side == "left" else 0
        place[begin : begin + len(row)] = row
    return padded


def take_labels(features: Sequence[Any]) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Split samples into what a tokenizer pads, and the rows named `labels` or `label`; None where there are none."""
    name = "label" if "label" in features[0] else "labels"
    rest = [{key: value for key, value in feature.items() if key != name} for feature in features]
    if name not in features[0] or all(feature[name] is None for feature in features):
        return rest, None
    return rest, [feature[name] for feature in features]


def check_return_tensors(collator: Any) -> None:
    """Raise unless a collator is asked for torch tensors, the only ones that are made here."""
    if collator.return_tensors != "pt":
        raise ValueError(
            f"return_tensors={collator.return_tensors!r}, but {type(collator).__name__} makes torch tensors; leave it "
            "at 'pt'"
        )


def refuse_words(sample: Any) -> None:
    """Raise ValueError where a label is a string: it could only be left out, or break somewhere else."""
    for key in ("label", "label_ids", "labels"):
        if isinstance(sample, Mapping) and isinstance(value := sample.get(key), str):
            raise ValueError(
                f"{key!r} is the string {value!r}; a model takes class numbers: replace every label by its number "
                "before training"
            )
