"""Pad samples of different lengths with a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tr_core.collators.rows import check_return_tensors, pad_with, refuse_words


@dataclass
class DataCollatorWithPadding:
    """Pad the samples of a batch to one length with a tokenizer, and name the labels `labels`.

    Args:
        tokenizer: an object whose `pad(samples, padding=, max_length=, pad_to_multiple_of=, return_tensors="pt")`
            pads, as those of transformers do.
        padding: True or `longest`, `max_length`, or False.
        max_length: length for `max_length`.
        pad_to_multiple_of: make lengths a multiple of this.
        return_tensors: `pt`, torch tensors.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        check_return_tensors(self)

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Return the padded batch as tensors.

        Raises:
            ValueError: labels are strings.
        """
        refuse_words(features[0])
        batch = pad_with(
            self.tokenizer,
            features,
            padding=self.padding,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        for key in ("label", "label_ids"):
            if key in batch:
                batch["labels"] = batch.pop(key)
        return batch
