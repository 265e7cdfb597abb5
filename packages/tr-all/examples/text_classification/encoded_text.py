"""Turn texts into token numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labelled_text import Sample, label_ids


def encode(
    samples: Sequence[Sample], names: Sequence[str], tokenizer: Any, max_length: int, source: str
) -> list[dict[str, Any]]:
    """Return what a model takes, one mapping a sample: token numbers, at most `max_length`, and `label`.

    Args:
        samples: they all have labels, or none has.
        names: names of the classes, in the order of the model's outputs.
        tokenizer: a tokenizer of transformers.
        max_length: tokens of a text, or of both texts of a pair, that are kept.
        source: which data this is, for messages.

    Raises:
        InputError: a label is not among `names`.
    """
    if not samples:
        return []
    pairs = None if samples[0].pair is None else [sample.pair for sample in samples]
    encoded = tokenizer([sample.text for sample in samples], pairs, truncation=True, max_length=max_length)
    rows = [{key: encoded[key][row] for key in encoded} for row in range(len(samples))]
    if samples[0].label is not None:
        for row, label in zip(rows, label_ids(samples, names, f"{source} data"), strict=True):
            row["label"] = label
    return rows


def longest_first(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Return the places of `rows` from the longest to the shortest: batches of like lengths need little padding.

    The longest come first so that memory that does not suffice shows at once.
    """
    return sorted(range(len(rows)), key=lambda place: -len(rows[place]["input_ids"]))
