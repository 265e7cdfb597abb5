"""Know the norm of a gradient that is never there at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tr_optim.projection.basis import Basis, seeded_normal

# Columns of a sketch for each of its rows: enough that the rows decide how exact it is.
_COLUMNS = 4


def sketch(gradient: torch.Tensor, rows: int, key: Sequence[object]) -> torch.Tensor:
    """Return random mixtures of a gradient's rows and columns, `(..., rows, 4 * rows)`.

    They add up as gradients do, for the mixing depends on `key` alone. Its expected squared norm is the gradient's.
    """
    return _mix_columns(_mixing(gradient.shape[-2], rows, gradient, (*key, "rows")) @ gradient, rows, key)


def estimated_norm(
    projected: torch.Tensor, basis: Basis, sketched: torch.Tensor, key: Sequence[object]
) -> torch.Tensor:
    """Estimate the norm of a gradient by its projection and its sketch; a scalar.

    What lies in the basis counts exactly, and only the rest is estimated: its expected square is exact. With 8 rows the
    norm over a model is off by 1 to 3 % of root mean square.

    Args:
        projected: what `basis.down` gave of the gradient.
        basis: orthonormal.
        sketched: what `sketch` gave of the gradient.
        key: that of the sketch.
    """
    left, right, rows = basis.left, basis.right, sketched.shape[-2]
    height = projected.shape[-2] if left is None else left.shape[-2]
    mixing = _mixing(height, rows, sketched, (*key, "rows"))
    inside = mixing @ projected if left is None else (mixing @ left) @ projected
    if right is not None:
        inside = inside @ right.mT
    rest = sketched - _mix_columns(inside, rows, key)
    return torch.hypot(torch.linalg.vector_norm(projected), torch.linalg.vector_norm(rest))


def total_norm(norms: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the norm of all parts whose norms are given, as `torch.nn.utils.clip_grad_norm_` adds them up."""
    stacked = [norm.to(device) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(stacked)) if stacked else torch.zeros((), device=device)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what gradients of a norm are multiplied by so that it is at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)


def _mix_columns(rows_mixed: torch.Tensor, rows: int, key: Sequence[object]) -> torch.Tensor:
    mixing = _mixing(rows_mixed.shape[-1], rows * _COLUMNS, rows_mixed, (*key, "columns"))
    return rows_mixed @ mixing.mT


def _mixing(size: int, mixtures: int, like: torch.Tensor, key: Sequence[object]) -> torch.Tensor:
    """Return `(mixtures, size)` random numbers whose columns have an expected squared norm of 1."""
    return seeded_normal((mixtures, size), like, key) * mixtures**-0.5
