"""Scale gradients by what an adaptive rule does to their projections, without sudden growth."""

from __future__ import annotations

from typing import Any

import torch

from tr_optim.moments.direction import bias_correction


class NormGrowthLimiter:
    """Let the norm of a scaled gradient grow by a factor of at most `norm_growth` from one step to the next.

    The norm that it is limited to is what the next step is compared with. A norm of zero, or one that is not finite,
    is no measure: the state keeps the last that was, so that neither a step without a gradient nor one that overflowed
    holds back those that follow. Nothing is read from the device.

    Source: the norm-growth limiter of Chen et al., "Fira" (2024). Deviations: what is kept after a norm of
    zero, from which nothing could grow again; and the norm is that of bias-corrected updates, where the authors' code
    takes them before the correction, so that the limit acts on the correction's course in the first steps.

    Args:
        before_correction: take norms before Adam's bias correction.
    """

    def __init__(self, *, before_correction: bool = False) -> None:
        self._before_correction = before_correction

    def __call__(self, norm: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        """Return what scaled gradients are to be multiplied by, and remember their norms.

        Args:
            norm: of each matrix's scaled gradient, without the learning rate.
            state: with `scaled_norm`, of the same shape; it is changed in place.
            group: with `norm_growth`; None for no limit.
        """
        if group["norm_growth"] is None:
            return torch.ones_like(norm)
        if self._before_correction:
            norm = norm / bias_correction(state, group)
        before = state["scaled_norm"]
        most = before * group["norm_growth"]
        grows = (before > 0) & (norm > most)
        limited = torch.where(grows, most, norm)
        before.copy_(torch.where(limited.isfinite() & (limited > 0), limited, before))
        return torch.where(grows, most / norm, 1.0)


def scaling(update: torch.Tensor, projected: torch.Tensor, dim: int | tuple[int, int]) -> torch.Tensor:
    """Return the norms of an update divided by those of the gradient that it was made of, `dim` being kept as 1.

    They are zero where the gradient is too small to have a norm.
    """
    own = torch.linalg.vector_norm(projected, dim=dim, keepdim=True)
    least = torch.finfo(own.dtype).tiny ** 0.5  # squares of less are zero
    ratio = torch.linalg.vector_norm(update, dim=dim, keepdim=True) / own.clamp(min=least)
    return torch.where(own > least, ratio, torch.where(own.isfinite(), 0.0, own))


def scaled_norm(ratio: torch.Tensor, gradient: torch.Tensor, dim: int | tuple[int, int]) -> torch.Tensor:
    """Return the norm of each matrix times its ratios, which are of what `scaling` returns for the same `dim`."""
    return torch.linalg.vector_norm(ratio * torch.linalg.vector_norm(gradient, dim=dim, keepdim=True), dim=(-2, -1))
