"""Make batches for language models: the next token or masked ones are the labels; sequences are padded or joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch.utils.data import get_worker_info

from tr_core.collators.padding import IGNORED_LABEL, check_return_tensors, in_kind, pad_rows, pad_with
from tr_core.random_state import derive_seed, is_seeded_by_position


@dataclass
class DataCollatorForLanguageModeling:
    """Pad token sequences and make their labels.

    With `mlm` some tokens are chosen at random: they are the labels, and most are replaced in the input. The random
    numbers come from torch's host generator. The Trainer's loaders seed it for each batch by seed, epoch and position.
    A resumed run, or one with other workers, therefore draws the same. Without `mlm` all tokens but the padding are
    labels.

    With a `seed`, other loaders and direct calls draw from the collator's own `generator`. Every collator of that seed
    masks the same batches in the same way. The generator is not seeded again for each batch. A worker process has its
    own, seeded by `seed` and the worker's number.

    Args:
        tokenizer: an object with `pad`, `pad_token_id`, `eos_token_id` and `padding_side`, as of transformers. `mlm`
            also needs `mask_token_id`, `__len__` and `get_special_tokens_mask(ids, already_has_special_tokens=True)`.
        mlm: masked language modeling.
        whole_word_mask: choose whole words instead of tokens. Samples need `offset_mapping`; a word is a run of it
            without a gap.
        mlm_probability: probability that a token, or word, is chosen; special tokens never are.
        mask_replace_prob: share of the chosen tokens that become the mask token.
        random_replace_prob: share of the chosen tokens that become a random one; the rest is not changed.
        pad_to_multiple_of: make lengths a multiple of this.
        return_tensors: `pt`, torch tensors, or `np`, arrays of NumPy.
        seed: makes the choices reproducible outside the Trainer. In the Trainer they are reproducible anyway, and
            differ between seeds.

    Source: Devlin et al. 2018, "BERT: Pre-training of deep bidirectional transformers", section 3.1.

    Raises:
        ValueError: a probability is out of range, or the tokenizer lacks a needed attribute.
    """

    tokenizer: Any
    mlm: bool = True
    whole_word_mask: bool = False
    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    seed: int | None = None

    def __post_init__(self) -> None:
        check_return_tensors(self)
        for name in ("mlm_probability", "mask_replace_prob", "random_replace_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a probability; give a number from 0 to 1")
        if self.mask_replace_prob + self.random_replace_prob > 1:
            raise ValueError(
                f"mask_replace_prob={self.mask_replace_prob} and random_replace_prob={self.random_replace_prob} are "
                "shares of the same tokens; lower one, so that they add up to at most 1"
            )
        if self.mlm and getattr(self.tokenizer, "mask_token_id", None) is None:
            raise ValueError(
                f"{type(self.tokenizer).__name__} has no mask token, which mlm=True needs; pass mlm=False to train a "
                "causal language model"
            )
        self._make_generator(None)
        if self.whole_word_mask and not self.mlm:
            raise ValueError("whole_word_mask=True chooses words to be masked, but mlm=False masks none; drop one")

    @property
    def required_columns(self) -> list[str]:
        """Columns of the data that the collator needs, though no model takes them."""
        columns = ["special_tokens_mask"] if self.mlm else []
        return [*columns, "offset_mapping"] if self.whole_word_mask else columns

    def __call__(self, features: Sequence[Any], return_tensors: str | None = None) -> dict[str, Any]:
        """Return the padded batch with `labels`.

        Args:
            features: samples that are mappings with `input_ids`, or rows of token ids. Their own labels are replaced.
            return_tensors: the kind of tensors; None for that of the collator.

        Raises:
            ValueError: samples have labels that would be lost, or lack a column, or cannot be padded.
        """
        batch, is_given = self._pad(features)
        special = batch.pop("special_tokens_mask", None)
        if self.mlm:
            batch["input_ids"], batch["labels"] = self._mask(batch["input_ids"], special, features)
        else:
            batch["labels"] = self._next_tokens(batch["input_ids"], is_given)
            self._check_given_labels(features, batch)
        return in_kind(batch, return_tensors or self.return_tensors)

    def _pad(self, features: Sequence[Any]) -> tuple[dict[str, Any], torch.Tensor | None]:
        """Return the padded batch, and a mask of the tokens that are not padding, if known."""
        if isinstance(features[0], Mapping):
            made_here = ("labels", "offset_mapping")
            rows = [{key: value for key, value in row.items() if key not in made_here} for row in features]
            batch = pad_with(self.tokenizer, rows, padding=True, pad_to_multiple_of=self.pad_to_multiple_of)
            mask = batch.get("attention_mask")
            return batch, None if mask is None else mask.bool()
        pad_id = self.tokenizer.pad_token_id
        ids = self._pad_rows(features, 0 if pad_id is None else pad_id)
        is_given = self._pad_rows([torch.ones(len(row)) for row in features], 0).bool()
        if pad_id is None and not is_given.all():
            raise ValueError(
                f"the samples of a batch differ in length and {type(self.tokenizer).__name__} has no pad token; set "
                "tokenizer.pad_token, to tokenizer.eos_token if there is no other"
            )
        return {"input_ids": ids}, is_given

    def _pad_rows(self, rows: Sequence[Any], value: int, width: int | None = None) -> torch.Tensor:
        multiple = None if width else self.pad_to_multiple_of
        return pad_rows(rows, value, width=width, multiple=multiple, side=self.tokenizer.padding_side)

    def _next_tokens(self, input_ids: torch.Tensor, is_given: torch.Tensor | None) -> torch.Tensor:
        pad_id = self.tokenizer.pad_token_id
        if pad_id is None:
            return input_ids.clone()
        is_padding = input_ids == pad_id
        if is_given is not None and pad_id == getattr(self.tokenizer, "eos_token_id", None):
            # One id for both: the model must learn an end of text that belongs to a sample.
            is_padding &= ~is_given
        return input_ids.masked_fill(is_padding, IGNORED_LABEL)

    def _mask(
        self, input_ids: torch.Tensor, special: torch.Tensor | None, features: Sequence[Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose tokens and return the inputs with them replaced, and the labels."""
        tokenizer, generator = self.tokenizer, self._generator()
        if special is None:
            find = tokenizer.get_special_tokens_mask
            special = torch.tensor([find(row, already_has_special_tokens=True) for row in input_ids.tolist()])
        may_be_chosen = ~special.bool()
        draws = torch.rand(input_ids.shape, generator=generator)
        if self.whole_word_mask:
            draws = draws.gather(1, self._number_words(features, may_be_chosen))  # one draw for a word
        chosen = may_be_chosen & (draws < self.mlm_probability)
        fate = torch.rand(input_ids.shape, generator=generator)
        becomes_mask = chosen & (fate < self.mask_replace_prob)
        becomes_random = chosen & ~becomes_mask & (fate < self.mask_replace_prob + self.random_replace_prob)
        random_ids = torch.randint(len(tokenizer), input_ids.shape, generator=generator)
        masked = input_ids.masked_fill(becomes_mask, tokenizer.mask_token_id)
        return masked.where(~becomes_random, random_ids), input_ids.masked_fill(~chosen, IGNORED_LABEL)

    def _number_words(self, features: Sequence[Any], may_be_chosen: torch.Tensor) -> torch.Tensor:
        """Return for each token the number of its word in its row; special tokens belong to the word before."""
        if "offset_mapping" not in features[0]:
            raise ValueError(
                "whole_word_mask=True tells words apart by the column 'offset_mapping', which the samples lack; encode "
                "them with return_offsets_mapping=True"
            )
        rows = [feature["offset_mapping"] for feature in features]
        offsets = self._pad_rows(rows, 0, width=may_be_chosen.shape[1])
        starts, ends_before = offsets[..., 0], offsets[..., 1].roll(1, dims=1)
        is_after_a_word = may_be_chosen.roll(1, dims=1)
        is_after_a_word[:, 0] = False
        begins = may_be_chosen & ((starts != ends_before) | ~is_after_a_word)
        return (begins.cumsum(dim=1) - 1).clamp(min=0)

    def _generator(self) -> torch.Generator | None:
        if self.seed is None:
            return None
        if is_seeded_by_position():
            place = int(torch.randint(1 << 62, ()))  # seeded by this batch's position in the run
            return torch.Generator().manual_seed(derive_seed(self.seed, place))
        worker = get_worker_info()
        number = None if worker is None else worker.id
        if self._generator_of != (self.seed, number):  # the seed has changed, or this is a worker's copy
            self._make_generator(number)
        return self.generator

    def _make_generator(self, worker: int | None) -> None:
        self._generator_of = (self.seed, worker)
        self.generator: torch.Generator | None = None
        if self.seed is not None:
            self.generator = torch.Generator().manual_seed(self.seed + (worker or 0))

    def _check_given_labels(self, features: Sequence[Any], batch: dict[str, Any]) -> None:
        if not isinstance(features[0], Mapping) or features[0].get("labels") is None:
            return
        ids, labels = batch["input_ids"], batch["labels"]
        given = self._pad_rows([feature["labels"] for feature in features], IGNORED_LABEL, width=ids.shape[1])
        if not ((given == labels) | (given == ids)).all():
            raise ValueError(
                "the samples bring labels other than their input_ids, and mlm=False makes labels of all tokens; use "
                "DataCollatorForSeq2Seq, which keeps the labels given, or leave the column labels out"
            )


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
