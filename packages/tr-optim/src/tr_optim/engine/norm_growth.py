"""Scale gradients by the effect of an adaptive rule on their projections, without sudden growth."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from tr_optim.engine.shards import Shards
from tr_optim.moments.adam import bias_correction


class NormGrowthLimiter:
    """Limit the growth of a scaled gradient's norm to a factor of `norm_growth` from one step to the next.

    The limited norm is compared with that of the next step. A norm of zero, or one that is not finite, is not stored;
    the state keeps the one before. So a step without a gradient or with an overflow does not limit later steps. Nothing
    is read from the device.

    Source: the norm-growth limiter of Chen et al., "Fira" (2024). Deviations: a norm of zero, from which nothing could
    grow again, is not stored. The norm is that of bias-corrected updates; the authors' code uses those before the
    correction, so their limit changes the correction in the first steps.

    Args:
        before_correction: use norms before Adam's bias correction.
    """

    def __init__(self, *, before_correction: bool = False) -> None:
        self._before_correction = before_correction

    def __call__(self, norm: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        """Return the factor of scaled gradients, and store their norms.

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


def scaling(update: torch.Tensor, projected: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the norms of an update's channels, divided by those of its gradient.

    They are zero if the gradient is too small to have a norm. Nothing is summed over ranks: a rank has whole rows, and
    all ranks have the whole columns of projections from the left.

    Args:
        update: of the projected gradient's shape.
        projected: the projected gradient.
        dim: dimension of the norms; it is kept as 1.
    """
    return _quotient(*(torch.linalg.vector_norm(tensor, dim=dim, keepdim=True) for tensor in (update, projected)))


def scaled_norm(
    ratio: torch.Tensor, gradient: torch.Tensor, dim: int, parts: Shards | None
) -> Generator[list[torch.Tensor], None, torch.Tensor]:
    """Return the norm of each matrix with channels multiplied by `ratio`; yield its square to sum over ranks.

    Args:
        ratio: what `scaling` returned for the same `dim`.
        gradient: this rank's rows, or all.
        dim: dimension of the channels' norms.
        parts: see `tr_optim.engine.updates.BackProjector`.
    """
    own = torch.linalg.vector_norm(ratio * torch.linalg.vector_norm(gradient, dim=dim, keepdim=True), dim=(-2, -1))
    [norm] = yield from _of_all_rows([own], parts)
    return norm


def matrix_scaling(
    update: torch.Tensor, projected: torch.Tensor, gradient: torch.Tensor, parts: Shards | None, *, has_rows: bool
) -> Generator[list[torch.Tensor], None, tuple[torch.Tensor, torch.Tensor]]:
    """Return a ratio for each matrix, `(..., 1, 1)`, as `scaling` does, and the norm of the matrix multiplied by it.

    Args:
        update: of the projected gradient's shape.
        projected: the projected gradient.
        gradient: this rank's rows, or all.
        parts: see `tr_optim.engine.updates.BackProjector`.
        has_rows: whether `update` and `projected` have the same rows as `gradient`; otherwise all ranks have the same.
    """
    new, own, norm = (torch.linalg.vector_norm(tensor, dim=(-2, -1)) for tensor in (update, projected, gradient))
    if has_rows:
        new, own, norm = yield from _of_all_rows([new, own, norm], parts)
    else:
        [norm] = yield from _of_all_rows([norm], parts)
    ratio = _quotient(new, own)
    return ratio[..., None, None], ratio * norm


def _of_all_rows(
    norms: list[torch.Tensor], parts: Shards | None
) -> Generator[list[torch.Tensor], None, list[torch.Tensor]]:
    """Return norms of whole matrices from those of this rank's rows."""
    if parts is None:
        return norms
    squares = [norm.to(torch.float64).square() for norm in norms]  # of a float32 they can be out of range
    yield squares
    return [square.sqrt().to(norm.dtype) for square, norm in zip(squares, norms, strict=True)]


def _quotient(new: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    least = torch.finfo(own.dtype).tiny ** 0.5  # squares of less are zero
    return torch.where(own > least, new / own.clamp(min=least), torch.where(own.isfinite(), 0.0, own))
