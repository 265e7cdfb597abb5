"""AdamW's rule without the learning rate, for what is limited before the learning rate is applied."""

from __future__ import annotations

import math
from typing import Any

import torch

from tr_optim.engine.shards import Shards
from tr_optim.moments.adam import AdamRule


class AdamDirection(AdamRule):
    """Leave the learning rate of projected parameters to what returns their updates; others as `AdamRule`.

    State of a projected parameter, beside the moments: `scaled_norm`, the norm that the next is limited by (see
    `NormGrowthLimiter`), one for each matrix of a stack, and 0 before the first.

    Args:
        as_upstream: eps before the bias correction, and weight decay after the update.
    """

    def __init__(self, *, as_upstream: bool = False) -> None:
        super().__init__(as_galore_torch=as_upstream)

    def start(
        self, state: dict[str, Any], like: torch.Tensor, group: dict[str, Any], shards: Shards | None = None
    ) -> None:
        """Give a new state what this rule remembers."""
        super().start(state, like, group, shards)
        if group["projects"]:
            state["scaled_norm"] = like.new_zeros(like.shape[:-2])

    def update(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], weights: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Take in a gradient.

        Returns:
            What is to be subtracted; of a projected parameter, what is to be multiplied by the learning rate before.
            And the rate that weight decay is multiplied by.
        """
        if not group["projects"]:
            return super().update(gradient, state, group, weights)
        direction, _ = super().update(gradient, state, {**group, "lr": 1.0}, weights)
        return direction, group["lr"]


def bias_correction(state: dict[str, Any], group: dict[str, Any]) -> float:
    """Return what Adam multiplies the quotient of its moments by in the early steps, without which it is larger."""
    beta1, beta2 = group["betas"]
    steps = int(state["step"])  # on the CPU
    return math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
