"""Pad sequences with the tokenizer, and labels to the same length or to their own; plain samples are stacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

IGNORED_LABEL = -100


class TokenizerCollator:
    """Pad with a tokenizer: the base of the dataclasses below, which have its options as fields."""

    tokenizer: Any
    padding: bool | str
    max_length: int | None
    pad_to_multiple_of: int | None
    return_tensors: str

    def __post_init__(self) -> None:
        check_return_tensors(self)

    def pad_features(self, features: Sequence[Any]) -> dict[str, Any]:
        """Return the samples as tensors, padded by the tokenizer."""
        options = {"max_length": self.max_length, "pad_to_multiple_of": self.pad_to_multiple_of}
        return pad_with(self.tokenizer, features, padding=self.padding, **options)


def pad_with(tokenizer: Any, features: Sequence[Any], **options: Any) -> dict[str, Any]:
    """Pad samples with `tokenizer.pad` and return the batch as torch tensors.

    Tokenizers of transformers log once that calling them pads faster than `pad` does. A collator has no such choice, so
    the log line is suppressed.

    Args:
        tokenizer: an object whose `pad(samples, padding=, max_length=, pad_to_multiple_of=, return_tensors="pt")`
            pads, as those of transformers do.
        features: samples of token ids and their other columns.
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
        rows: lists, arrays or tensors of one dimension, or of two if those are equal.
        value: the padding value.
        width: the length to pad to; None for that of the longest row.
        multiple: make the width a multiple of this.
        side: where to pad: `right` or `left`.

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
    """Split samples into the part that a tokenizer pads and the rows of `labels` or `label`; None without labels."""
    name = "label" if "label" in features[0] else "labels"
    rest = [{key: value for key, value in feature.items() if key != name} for feature in features]
    if name not in features[0] or all(feature[name] is None for feature in features):
        return rest, None
    return rest, [feature[name] for feature in features]


def check_return_tensors(collator: Any) -> None:
    """Raise unless a collator's `return_tensors` is `pt` or `np`."""
    in_kind({}, collator.return_tensors)


def in_kind(batch: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a batch of torch tensors as it is (`pt`), or as arrays of NumPy (`np`).

    Raises:
        ValueError: another kind.
    """
    if kind not in ("pt", "np"):
        raise ValueError(f"return_tensors={kind!r} is not known; choose 'pt', torch tensors, or 'np', arrays of NumPy")
    if kind == "pt":
        return batch
    return {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def refuse_words(sample: Any) -> None:
    """Raise ValueError if a label is a string: it would be dropped, or fail later."""
    for key in ("label", "label_ids", "labels"):
        if isinstance(sample, Mapping) and isinstance(value := sample.get(key), str):
            raise ValueError(
                f"{key!r} is the string {value!r}; a model takes class numbers: replace every label by its number "
                "before training"
            )


def default_data_collator(features: list[Any], return_tensors: str = "pt") -> Any:
    """Stack samples that are mappings, or objects with attributes, into a dict of tensors.

    The key `label` (one number a sample) or `label_ids` (one or a row of numbers) becomes `labels`: int64 for whole
    numbers, else float32. None and strings are dropped, but a string label raises. Samples of any other kind (tuples,
    tensors) are stacked as torch's own `default_collate` does.

    Args:
        features: the samples; all have the keys of the first.
        return_tensors: `pt`, torch tensors, or `np`, arrays of NumPy.

    Raises:
        ValueError: a label is a string; or rows of unequal length, or of strings, cannot be stacked.
        TypeError: the samples are strings.
    """
    first = features[0]
    if isinstance(first, tuple | list | torch.Tensor | np.ndarray | int | float):
        return default_collate(features)
    if not isinstance(first, Mapping):
        features = _columns_of(features)
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
            try:
                batch[key] = torch.stack(values) if isinstance(value, torch.Tensor) else _stack(values)
            except (ValueError, RuntimeError) as error:
                if why := _why_not_stacked(key, values):
                    raise ValueError(why) from error
                raise
    return batch if return_tensors == "pt" else in_kind(batch, return_tensors)  # a step calls it with "pt"


def _columns_of(samples: list[Any]) -> list[dict[str, Any]]:
    if isinstance(samples[0], str):
        raise TypeError(
            f"the data set holds strings such as {samples[0][:40]!r}, and a sample is a mapping of columns: tokenize "
            "them first, for example with [tokenizer(text, truncation=True) for text in texts]"
        )
    return [vars(sample) for sample in samples]


def _labels(values: list[Any]) -> torch.Tensor:
    if isinstance(values[0], torch.Tensor):
        return torch.stack(values)
    labels = torch.as_tensor(np.asarray(values))
    return labels.float() if labels.is_floating_point() else labels.long()


def _stack(values: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(values)) if isinstance(values[0], np.ndarray) else torch.tensor(values)


def _why_not_stacked(key: str, values: list[Any]) -> str:
    """Return why a column makes no tensor, and what to do; empty if that is not known."""
    lengths = sorted({len(value) for value in values if isinstance(value, Sized) and getattr(value, "ndim", 1)})
    if len(lengths) > 1:
        return (
            f"column {key!r} has rows of {lengths[0]} to {lengths[-1]} values, which cannot be stacked; give the "
            "Trainer the tokenizer as processing_class or a data_collator that pads, or make the rows of one length"
        )
    is_text = isinstance(values[0], list | tuple) and any(isinstance(word, str) for word in values[0])
    return f"column {key!r} holds strings: tokenize them first, for example with dataset.map(...)" if is_text else ""


@dataclass
class DataCollatorWithPadding(TokenizerCollator):
    """Pad the samples of a batch to one length with a tokenizer, and name the labels `labels`.

    Args:
        tokenizer: an object whose `pad(samples, padding=, max_length=, pad_to_multiple_of=, return_tensors="pt")`
            pads, as those of transformers do.
        padding: True or `longest`, `max_length`, or False.
        max_length: length for `max_length`.
        pad_to_multiple_of: make lengths a multiple of this.
        return_tensors: `pt`, torch tensors, or `np`, arrays of NumPy.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> dict[str, Any]:
        """Return the padded batch as tensors.

        Raises:
            ValueError: labels are strings.
        """
        refuse_words(features[0])
        batch = self.pad_features(features)
        for key in ("label", "label_ids"):
            if key in batch:
                batch["labels"] = batch.pop(key)
        return in_kind(batch, return_tensors or self.return_tensors)


@dataclass
class DataCollatorForTokenClassification(TokenizerCollator):
    """Pad the samples of a batch with a tokenizer, and their labels to the same length.

    Args:
        tokenizer: an object with `padding_side`, whose `pad(samples, padding=, max_length=, pad_to_multiple_of=,
            return_tensors="pt")` pads, as those of transformers do.
        padding: True or `longest`, `max_length`, or False.
        max_length: length for `max_length`.
        pad_to_multiple_of: make lengths a multiple of this.
        label_pad_token_id: the padding value of labels; losses ignore -100.
        return_tensors: `pt`, torch tensors, or `np`, arrays of NumPy.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORED_LABEL
    return_tensors: str = "pt"

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> dict[str, Any]:
        """Return the padded batch as tensors, with `labels` of the shape of `input_ids`.

        Raises:
            ValueError: a sample has more labels than the batch is wide.
        """
        features, labels = take_labels(features)
        batch = self.pad_features(features)
        if labels is not None:
            width, side = batch["input_ids"].shape[1], self.tokenizer.padding_side
            try:
                batch["labels"] = pad_rows(labels, self.label_pad_token_id, width=width, side=side)
            except ValueError as error:
                raise ValueError(
                    f"more labels than tokens: {error}; give one label for each token, as tokens were split and "
                    "truncated"
                ) from error
        return in_kind(batch, return_tensors or self.return_tensors)


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
