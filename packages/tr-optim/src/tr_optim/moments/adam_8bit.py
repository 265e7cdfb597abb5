"""AdamW's rule with moments in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tr_optim.engine.chunks import chunks
from tr_optim.engine.shards import Shards, shards_of
from tr_optim.moments.adam import AdamRule
from tr_optim.moments.blockwise_int8 import SIGNED, UNSIGNED, Code, dequantize, new_codes, quantize_, scales_shape
from tr_optim.projection.rotation import Rotation
from tr_optim.projection.row_shards import is_divided

_CODES: dict[str, Code] = {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}


class Adam8bitRule(AdamRule):
    """Scale a gradient by decaying means of it and of its square, which are kept in 8 bits between steps.

    State of a (projected) gradient R: `exp_avg` int8 and `exp_avg_sq` uint8, of its shape, `exp_avg_scale` and
    `exp_avg_sq_scale` float32, one for each 256 elements of a row: for m rows of n that is `2 m n + 8 m ceil(n / 256)`
    bytes, 2.03 an element. With less than `min_8bit_size` (of its group) elements it is that of `AdamRule`.

    An update is made of the moments before they are rounded. What it takes beside the update does not grow with n.
    """

    def start(
        self, state: dict[str, Any], like: torch.Tensor, group: dict[str, Any], shards: Shards | None = None
    ) -> None:
        """Give a new state what this rule remembers."""
        if not is_to_be_quantized(like, group, shards):
            super().start(state, like, group, shards)
            return
        for name, code in _CODES.items():
            state[name], state[f"{name}_scale"] = new_codes(like, code)

    def rotate(self, state: dict[str, Any], rotation: Rotation) -> None:
        """Carry the state over to another basis."""
        if not is_quantized(state):
            super().rotate(state, rotation)
            return
        kept = {name: dequantize(state[name], state[f"{name}_scale"], code) for name, code in _CODES.items()}
        moments = {name: values.to(rotation.dtype) for name, values in kept.items()}
        super().rotate(moments, rotation)
        state.update(quantized(moments))

    def update(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], weights: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Take in a gradient.

        Returns:
            What is to be subtracted from the weights, in the gradient's coordinates, and the rate that weight decay is
            multiplied by.
        """
        if not is_quantized(state):
            return super().update(gradient, state, group, weights)
        step, update = int(state["step"]), torch.empty_like(gradient)
        rate = None
        stored = [state[key] for name in _CODES for key in (name, f"{name}_scale")]
        for part, update_part, *stored_part in chunks(gradient, update, *stored):
            kept = dict(zip(_CODES, zip(stored_part[::2], stored_part[1::2], strict=True), strict=True))
            moments = {name: dequantize(*kept[name], code).to(part.dtype) for name, code in _CODES.items()}
            found, rate = super().update(part, {"step": state["step"], **moments}, group, weights)
            update_part.copy_(found)
            for name, code in _CODES.items():
                quantize_(*kept[name], moments[name].to(torch.float32), code, step)
        return update, rate


def is_to_be_quantized(like: torch.Tensor, group: dict[str, Any], shards: Shards | None) -> bool:
    """Whether moments of gradients like `like` are kept in 8 bits: the same on all ranks, also on those with few rows.

    Of parameters with one dimension that are divided over ranks they are not: parts of a row have no blocks in common.
    """
    if shards is None:
        return like.numel() >= group["min_8bit_size"]
    return like.dim() > 1 and shards.shape[0] * like.shape[1:].numel() >= group["min_8bit_size"]


def is_quantized(state: dict[str, Any]) -> bool:
    """Whether a state's moments are codes."""
    return "exp_avg_scale" in state


def quantized(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state with its moments rounded to the nearest codes.

    Args:
        state: with `exp_avg` and `exp_avg_sq` in floating point; it stays as it is.
    """
    rounded = dict(state)
    for name, code in _CODES.items():
        rounded[name], rounded[f"{name}_scale"] = new_codes(state[name], code)
        values = state[name].to(torch.float32, memory_format=torch.contiguous_format)
        quantize_(rounded[name], rounded[f"{name}_scale"], values, code)
    return rounded


def take_over(optimizer: Optimizer, saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Settle an optimizer's state after it was loaded: that of one with float32 moments is rounded to codes.

    Args:
        optimizer: one whose groups have `min_8bit_size`.
        saved_groups: what the groups were loaded from; those that lack it have float32 moments.

    Raises:
        ValueError: codes are there without their scales, or in another dtype.
    """
    for group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
        is_own = "min_8bit_size" in saved_group
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if not state:
                continue
            if is_quantized(state):
                _check_codes(state, parameter)
                continue
            shards = shards_of(parameter)
            if shards is not None and not is_divided("exp_avg", shards, group):
                shards = None
            if not is_own and is_to_be_quantized(state["exp_avg"], group, shards):
                optimizer.state[parameter] = quantized(state)


def check_least_size(group: dict[str, Any]) -> None:
    """Raise where a group's `min_8bit_size` is out of range.

    Raises:
        ValueError: the message says what is needed.
    """
    size = group["min_8bit_size"]
    if isinstance(size, bool) or not isinstance(size, int) or size < 0:
        raise ValueError(
            f"min_8bit_size={size!r} must be a whole number from 0: elements from which moments are kept in 8 bits"
        )


def _check_codes(state: dict[str, Any], parameter: torch.Tensor) -> None:
    for name, code in _CODES.items():
        codes, scales = state[name], state.get(f"{name}_scale")
        needed, found = scales_shape(codes.shape), None if scales is None else tuple(scales.shape)
        if codes.dtype != code.dtype or found != needed:
            raise ValueError(
                f"the saved optimizer state of a parameter of shape {tuple(parameter.shape)} cannot be read: {name} is "
                f"{codes.dtype} with scales of shape {found}, and {code.dtype} with {needed} is needed; load the "
                "tensors as they were saved"
            )
