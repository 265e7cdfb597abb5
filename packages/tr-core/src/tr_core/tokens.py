"""Count the input tokens that a run trains on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from tr_core.data.order import MicroBatch
from tr_core.model_io import main_input_name

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


class TokenCounter:
    """Count the elements of the main input of this rank's micro-batches.

    Batches come from the loader with host tensors, so nothing is read from a device; where a collator made them on one,
    the count stays there until `take`.

    Args:
        input_name: key of the main input in a batch.
        only_real: leave out padding, by the batch's `attention_mask` if it has one, else by `padding`.
        padding: the token that fills up, None if there is none.
    """

    def __init__(self, input_name: str, *, only_real: bool = False, padding: int | None = None) -> None:
        self._input_name, self._only_real, self._padding = input_name, only_real, padding
        self._on_host, self._on_device = 0, None

    def count(self, batch: MicroBatch) -> None:
        """Add a micro-batch; one that only fills up, so that this rank takes part, has no tokens of its own.

        Raises:
            ValueError: the batch does not say what its tokens are, or which of them are padding.
        """
        if batch.weight == 0.0:
            return
        tokens = self._main_input(batch.inputs)
        if not self._only_real:
            self._on_host += tokens.numel()
            return
        number = self._is_real(batch.inputs, tokens).sum()
        if number.device.type == "cpu":
            self._on_host += int(number)
        else:
            self._on_device = number if self._on_device is None else self._on_device + number

    def take(self) -> int:
        """Return the tokens counted since the last call."""
        on_device = 0 if self._on_device is None else int(self._on_device)  # sync: once a log, if at all
        tokens, self._on_host, self._on_device = self._on_host + on_device, 0, None
        return tokens

    def _main_input(self, inputs: Any) -> torch.Tensor:
        tokens = inputs.get(self._input_name) if isinstance(inputs, Mapping) else None
        if isinstance(tokens, torch.Tensor):
            return tokens
        given = sorted(map(str, inputs)) if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
        raise ValueError(
            f"include_num_input_tokens_seen counts the elements of {self._input_name!r}, but a batch is {given}; set "
            "model.main_input_name to the key of the model's main input, or include_num_input_tokens_seen='no'"
        )

    def _is_real(self, inputs: Mapping[str, Any], tokens: torch.Tensor) -> torch.Tensor:
        mask = inputs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            return mask != 0
        if self._padding is not None:
            return tokens != self._padding
        raise ValueError(
            "include_num_input_tokens_seen='non_padding' cannot tell what is padding: batches have no attention_mask "
            "of shape (samples, tokens), and there is no processing_class with a pad_token_id; add one of them, or "
            "count 'all'"
        )


def build_token_counter(trainer: Trainer) -> TokenCounter | None:
    """Return what `include_num_input_tokens_seen` asks for; None where it is `no`."""
    mode = trainer.args.include_num_input_tokens_seen
    if mode == "no":
        return None
    processor = trainer.processing_class
    padding = getattr(processor, "pad_token_id", None)
    return TokenCounter(main_input_name(trainer.model), only_real=mode == "non_padding", padding=padding)
