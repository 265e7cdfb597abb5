"""Pad samples that have a label for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tr_core.collators.rows import IGNORED_LABEL, check_return_tensors, pad_rows, pad_with, take_labels


@dataclass
class DataCollatorForTokenClassification:
    """Pad the samples of a batch with a tokenizer, and their labels to the same length.

    Args:
        tokenizer: an object with `padding_side`, whose `pad(samples, padding=, max_length=, pad_to_multiple_of=,
            return_tensors="pt")` pads, as those of transformers do.
        padding: True or `longest`, `max_length`, or False.
        max_length: length for `max_length`.
        pad_to_multiple_of: make lengths a multiple of this.
        label_pad_token_id: what fills the labels; -100 is left out of losses.
        return_tensors: `pt`, torch tensors.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORED_LABEL
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        check_return_tensors(self)

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Return the padded batch as tensors, with `labels` of the shape of `input_ids`.

        Raises:
            ValueError: a sample has more labels than the batch is wide.
        """
        features, labels = take_labels(features)
        batch = pad_with(
            self.tokenizer,
            features,
            padding=self.padding,
            max_length=self.max_length,
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        if labels is not None:
            width, side = batch["input_ids"].shape[1], self.tokenizer.padding_side
            try:
                batch["labels"] = pad_rows(labels, self.label_pad_token_id, width=width, side=side)
            except ValueError as error:
                raise ValueError(
                    f"more labels than tokens: {error}; give one label for each token, as tokens were split and "
                    "truncated"
                ) from error
        return batch
