"""Scale gradients by what an adaptive rule does to their projections, without sudden growth."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch

from tr_optim.engine.shards import Shards
from tr_optim.moments.adam import bias_correction


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


def scaling(update: torch.Tensor, projected: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the norms of an update's channels, divided by those of the gradient that it was made of.

    They are zero where the gradient is too small to have a norm. Channels that are rows are all of a rank's, and of
    columns that were projected from the left all ranks have the whole: nothing is added up.

    Args:
        update: of the projected gradient's shape.
        projected: the projected gradient.
        dim: that the norms are over; it is kept as 1.
    """
    return _quotient(*(torch.linalg.vector_norm(tensor, dim=dim, keepdim=True) for tensor in (update, projected)))


def scaled_norm(
    ratio: torch.Tensor, gradient: torch.Tensor, dim: int, parts: Shards | None
) -> Generator[list[torch.Tensor], None, torch.Tensor]:
    """Return the norm of each matrix whose channels are multiplied by `ratio`; give its square to be added up.

    Args:
        ratio: what `scaling` returned for the same `dim`.
        gradient: this rank's rows, or all.
        dim: that norms of channels are over.
        parts: see `tr_optim.engine.updates.BackProjector`.
    """
    own = torch.linalg.vector_norm(ratio * torch.linalg.vector_norm(gradient, dim=dim, keepdim=True), dim=(-2, -1))
    [norm] = yield from _of_all_rows([own], parts)
    return norm


def matrix_scaling(
    update: torch.Tensor, projected: torch.Tensor, gradient: torch.Tensor, parts: Shards | None, *, has_rows: bool
) -> Generator[list[torch.Tensor], None, tuple[torch.Tensor, torch.Tensor]]:
    """Return as `scaling` a ratio for each matrix, `(..., 1, 1)`, and the norm of the matrix multiplied by it.

    Args:
        update: of the projected gradient's shape.
        projected: the projected gradient.
        gradient: this rank's rows, or all.
        parts: see `tr_optim.engine.updates.BackProjector`.
        has_rows: whether `update` and `projected` are of the same rows as `gradient`, else all ranks have the same.
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
    """Return norms of whole matrices, of those of this rank's rows."""
    if parts is None:
        return norms
    squares = [norm.to(torch.float64).square() for norm in norms]  # of a float32 they can be out of range
    yield squares
    return [square.sqrt().to(norm.dtype) for square, norm in zip(squares, norms, strict=True)]


def _quotient(new: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    least = torch.finfo(own.dtype).tiny ** 0.5  # squares of less are zero
    return torch.where(own > least, new / own.clamp(min=least), torch.where(own.isfinite(), 0.0, own))
