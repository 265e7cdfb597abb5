"""Pad samples whose labels are a sequence of their own length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tr_core.collators.padding import IGNORED_LABEL, TokenizerCollator, in_kind, pad_rows, take_labels


@dataclass
class DataCollatorForSeq2Seq(TokenizerCollator):
    """Pad the inputs of a batch with a tokenizer, and the labels to their own length.

    Use it also for causal language models with separate labels, such as those without the prompt in the loss.

    Args:
        tokenizer: an object with `padding_side`, whose `pad(samples, padding=, max_length=, pad_to_multiple_of=,
            return_tensors="pt")` pads, as those of transformers do.
        model: with its `prepare_decoder_input_ids_from_labels(labels=)`, the batch gets `decoder_input_ids`. Label
            smoothing needs them, because it calls the model without labels.
        padding: True or `longest`, `max_length`, or False.
        max_length: length for `max_length`, of inputs and labels.
        pad_to_multiple_of: make lengths a multiple of this.
        label_pad_token_id: the padding value of labels; losses ignore -100.
        return_tensors: `pt`, torch tensors, or `np`, arrays of NumPy.
    """

    tokenizer: Any
    model: Any = None
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORED_LABEL
    return_tensors: str = "pt"

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> dict[str, Any]:
        """Return the padded batch as tensors; it has labels if the samples have.

        Raises:
            ValueError: labels are longer than `max_length`, or of different lengths without padding.
        """
        features, labels = take_labels(features)
        batch = self.pad_features(features)
        if labels is not None:
            batch["labels"] = self._pad(labels)
            prepare = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
            if prepare is not None:
                batch["decoder_input_ids"] = prepare(labels=batch["labels"])
        return in_kind(batch, return_tensors or self.return_tensors)

    def _pad(self, labels: list[Any]) -> torch.Tensor:
        if self.padding is False or self.padding == "do_not_pad":
            if len({len(row) for row in labels}) > 1:
                raise ValueError(
                    f"padding={self.padding!r} leaves labels of different lengths, {[len(row) for row in labels]}, "
                    "which make no tensor; use padding=True, or samples of one length"
                )
            return pad_rows(labels, self.label_pad_token_id)
        width = self.max_length if self.padding == "max_length" else None
        try:
            return pad_rows(
                labels,
                self.label_pad_token_id,
                width=width,
                multiple=self.pad_to_multiple_of,
                side=self.tokenizer.padding_side,
            )
        except ValueError as error:
            raise ValueError(
                f"labels longer than max_length={self.max_length}: {error}; truncate them when they are encoded, or "
                "raise max_length"
            ) from error
