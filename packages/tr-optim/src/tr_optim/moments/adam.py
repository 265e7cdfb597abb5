"""AdamW's rule, for gradients and projections of gradients."""

from __future__ import annotations

import math
from typing import Any

import torch

from tr_optim.engine.shards import Shards
from tr_optim.projection.rotation import Rotation


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
        """Give a new state what this rule remembers."""
        state["exp_avg"] = torch.zeros_like(like)
        state["exp_avg_sq"] = torch.zeros_like(like)

    def rotate(self, state: dict[str, Any], rotation: Rotation) -> None:
        """Carry the state over to another basis."""
        state["exp_avg"] = rotation.first(state["exp_avg"])
        state["exp_avg_sq"] = rotation.second(state["exp_avg_sq"])

    def update(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], weights: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Take in a gradient.

        Returns:
            What is to be subtracted from the weights, in the gradient's coordinates, and the rate that weight decay is
            multiplied by.
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


def check_adam(lr: float | torch.Tensor, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise where an option is out of range.

    Raises:
        ValueError: the message says what is needed.
    """
    if not isinstance(lr, torch.Tensor) and lr < 0:
        raise ValueError(f"lr={lr:g} must not be negative")
    if weight_decay < 0:
        raise ValueError(f"weight_decay={weight_decay:g} must not be negative: it would let weights grow")
    if not (len(betas) == 2 and all(0 <= beta < 1 for beta in betas)):
        raise ValueError(f"betas={betas} must be two numbers from 0 to below 1")
    if eps < 0:
        raise ValueError(f"eps={eps:g} must not be negative")
