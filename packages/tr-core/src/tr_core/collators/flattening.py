"""Concatenate the sequences of a batch instead of padding them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from tr_core.collators.padding import IGNORED_LABEL, check_return_tensors, in_kind


@dataclass
class DataCollatorWithFlattening:
    """Join the sequences of a batch into one of shape (1, tokens), without padding.

    Use it for causal language models whose attention separates the sequences by `position_ids` or by the lengths. In
    any other model each sequence attends to those before it. Models of transformers separate them with
    `config.use_cache=False`.

    Args:
        return_tensors: `pt`, torch tensors, or `np`, arrays of NumPy.
        return_position_ids: add `position_ids`, which restart with each sequence.
        separator_id: label of each sequence's first token, which no token of the same sequence predicts; losses ignore
            -100.
        return_flash_attn_kwargs: add `cu_seq_lens_q`, `cu_seq_lens_k` (int32, where sequences begin and the last
            ends), `max_length_q` and `max_length_k` (int).
        return_seq_idx: add `seq_idx` (int32), the number of each token's sequence.
        position_ids_start: the first position of a sequence; not 0 for the models that count from `padding_idx + 1`.
    """

    return_tensors: str = "pt"
    return_position_ids: bool = field(default=True, kw_only=True)
    separator_id: int = field(default=IGNORED_LABEL, kw_only=True)
    return_flash_attn_kwargs: bool = field(default=False, kw_only=True)
    return_seq_idx: bool = field(default=False, kw_only=True)
    position_ids_start: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_return_tensors(self)

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> dict[str, Any]:
        """Return the joined sequences; labels are those of the samples, or their tokens."""
        rows = [torch.as_tensor(sample["input_ids"], dtype=torch.int64) for sample in features]
        name = "labels" if "labels" in features[0] else "input_ids"
        labels = torch.cat([torch.as_tensor(sample[name], dtype=torch.int64) for sample in features])
        lengths = [len(row) for row in rows]
        begins = [0, *accumulate(lengths)]
        labels[begins[:-1]] = self.separator_id
        batch: dict[str, Any] = {"input_ids": torch.cat(rows)[None], "labels": labels[None]}
        if self.return_position_ids:
            start = self.position_ids_start
            batch["position_ids"] = torch.cat([torch.arange(start, start + length) for length in lengths])[None]
        if self.return_seq_idx:
            numbers = torch.arange(len(rows), dtype=torch.int32)
            batch["seq_idx"] = numbers.repeat_interleave(torch.tensor(lengths))[None]
        if self.return_flash_attn_kwargs:
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.tensor(begins, dtype=torch.int32)
            batch["max_length_q"] = batch["max_length_k"] = max(lengths)
        return in_kind(batch, return_tensors or self.return_tensors)
