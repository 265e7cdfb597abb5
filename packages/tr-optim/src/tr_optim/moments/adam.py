"""Apply AdamW's rule to gradients and projections of gradients, with moments in float32 or in 8 bits.

`AdamDirection` leaves out the learning rate, for updates that are limited before the learning rate is applied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tr_optim.engine.precision import chunks
from tr_optim.engine.shards import Shards, shards_of
from tr_optim.moments.blockwise_int8 import SIGNED, UNSIGNED, Code, dequantize, new_codes, quantize_, scales_shape
from tr_optim.projection.layout import is_divided
from tr_optim.projection.refresh import Rotation


class AdamRule:
    """Scale a gradient by decaying means of it and of its square.

    State of a (projected) gradient R: `exp_avg` and `exp_avg_sq`, of its shape and dtype.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), Algorithm 2, as torch.optim.AdamW has
    it: eps is added to the corrected root of the second moment.

    Args:
        as_galore_torch: eps before the bias correction, and weight decay after the update, as galore-torch 1.0 has
            them.

    Attributes:
        decays_after: whether weight decay follows the update.
        is_elementwise: each number depends on its own gradients only.
    """

    is_elementwise = True

    def __init__(self, *, as_galore_torch: bool = False) -> None:
        self.decays_after = as_galore_torch

    def start(
        self, state: dict[str, Any], like: torch.Tensor, group: dict[str, Any], shards: Shards | None = None
    ) -> None:
        """Add this rule's moments to a new state."""
        state["exp_avg"] = torch.zeros_like(like)
        state["exp_avg_sq"] = torch.zeros_like(like)

    def rotate(self, state: dict[str, Any], rotation: Rotation) -> None:
        """Rotate the moments to another basis."""
        state["exp_avg"] = rotation.first(state["exp_avg"])
        state["exp_avg_sq"] = rotation.second(state["exp_avg_sq"])

    def update(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], weights: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Update the moments with a gradient, and return the update.

        Returns:
            The update to subtract from the weights, in the gradient's coordinates, and the rate for weight decay.
        """
        beta1, beta2 = group["betas"]
        steps = int(state["step"])  # on the CPU
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        correction = math.sqrt(1 - beta2**steps)
        if self.decays_after:
            mean.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
            step = mean / square.sqrt().add_(group["eps"])
            return step.mul_(group["lr"] * correction / (1 - beta1**steps)), group["lr"]
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step = mean / (square.sqrt().div_(correction)).add_(group["eps"])
        return step.mul_(group["lr"] / (1 - beta1**steps)), group["lr"]


def check_rates(lr: float | torch.Tensor | None, weight_decay: float) -> None:
    """Raise if the learning rate or the weight decay is negative.

    Raises:
        ValueError: the message says which.
    """
    if lr is not None and not isinstance(lr, torch.Tensor) and lr < 0:
        raise ValueError(f"lr={lr:g} must not be negative")
    if not isinstance(weight_decay, torch.Tensor) and weight_decay < 0:
        raise ValueError(f"weight_decay={weight_decay:g} must not be negative: it would let weights grow")


def adam_options(
    lr: float | torch.Tensor, betas: tuple[float, float], eps: float, weight_decay: float
) -> dict[str, Any]:
    """Check Adam's arguments, and return them as options of a group.

    Raises:
        ValueError: one is out of range.
    """
    check_rates(lr, weight_decay)
    if not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise ValueError(f"betas={betas} must be two numbers from 0 to below 1")
    if eps < 0:
        raise ValueError(f"eps={eps:g} must not be negative")
    return {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}


class AdamDirection(AdamRule):
    """Like `AdamRule`, but the back projection applies the learning rate of projected parameters.

    State of a projected parameter, beside the moments: `scaled_norm`, the norm that limits the next one (see
    `NormGrowthLimiter`), one for each matrix of a stack, and 0 before the first.

    Args:
        as_upstream: eps before the bias correction, and weight decay after the update.
    """

    def __init__(self, *, as_upstream: bool = False) -> None:
        super().__init__(as_galore_torch=as_upstream)

    def start(
        self, state: dict[str, Any], like: torch.Tensor, group: dict[str, Any], shards: Shards | None = None
    ) -> None:
        """Add this rule's moments to a new state."""
        super().start(state, like, group, shards)
        if group["projects"]:
            state["scaled_norm"] = like.new_zeros(like.shape[:-2])

    def update(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], weights: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Update the moments with a gradient, and return the update.

        Returns:
            The update to subtract; for a projected parameter, without the learning rate. And the rate for weight decay.
        """
        if not group["projects"]:
            return super().update(gradient, state, group, weights)
        direction, _ = super().update(gradient, state, {**group, "lr": 1.0}, weights)
        return direction, group["lr"]


def bias_correction(state: dict[str, Any], group: dict[str, Any]) -> float:
    """Return Adam's factor of the quotient of its moments, which keeps early steps from being too large."""
    beta1, beta2 = group["betas"]
    steps = int(state["step"])  # on the CPU
    return math.sqrt(1 - beta2**steps) / (1 - beta1**steps)


_CODES: dict[str, Code] = {"exp_avg": SIGNED, "exp_avg_sq": UNSIGNED}


class Adam8bitRule(AdamRule):
    """Scale a gradient by decaying means of it and of its square, stored in 8 bits between steps.

    State of a (projected) gradient R: `exp_avg` int8 and `exp_avg_sq` uint8, of its shape, `exp_avg_scale` and
    `exp_avg_sq_scale` float32, one for each 256 elements of a row: for m rows of n that is `2 m n + 8 m ceil(n / 256)`
    bytes, 2.03 an element. With less than `min_8bit_size` (of its group) elements it is that of `AdamRule`.

    An update uses the moments before they are rounded. Its work space does not grow with n.
    """

    def start(
        self, state: dict[str, Any], like: torch.Tensor, group: dict[str, Any], shards: Shards | None = None
    ) -> None:
        """Add this rule's moments to a new state."""
        if not is_to_be_quantized(like, group, shards):
            super().start(state, like, group, shards)
            return
        for name, code in _CODES.items():
            state[name], state[f"{name}_scale"] = new_codes(like, code)

    def rotate(self, state: dict[str, Any], rotation: Rotation) -> None:
        """Rotate the moments to another basis."""
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
        """Update the moments with a gradient, and return the update.

        Returns:
            The update to subtract from the weights, in the gradient's coordinates, and the rate for weight decay.
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
    """Whether moments of gradients like `like` are kept in 8 bits; all ranks decide the same, also with few rows.

    Sharded parameters with one dimension keep float32 moments, because parts of a row have no common blocks.
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


def convert_loaded_state(optimizer: Optimizer, saved_groups: Sequence[Mapping[str, Any]]) -> None:
    """Convert an optimizer's loaded state: float32 moments are rounded to codes.

    Args:
        optimizer: one whose groups have `min_8bit_size`.
        saved_groups: the saved groups; those without `min_8bit_size` have float32 moments.

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
    """Raise if a group's `min_8bit_size` is out of range.

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
