"""Find a low-rank basis of a gradient of which each rank holds some rows, without gathering it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence

import torch

from tr_optim.engine.shards import Shards
from tr_optim.projection.basis import (
    COLD_ITERATIONS,
    SHIFT,
    WARM_ITERATIONS,
    Basis,
    orthonormalise,
    seeded_normal,
    sides,
)

_NOT_OF_ROWS = ("basis_right", "exp_avg_sq_col")

Sum = Callable[[torch.Tensor], torch.Tensor]


def find_basis_of_rows(
    gradient: torch.Tensor,
    shards: Shards,
    rank: int,
    proj_type: str,
    old: Basis | None = None,
    *,
    key: Sequence[object],
) -> Basis:
    """Return the basis that `find_basis` finds of the whole gradient, to rounding; all ranks call it.

    Columns from the left lie with the rows, so that an iteration exchanges `(n, r)` sums and three small ones; those
    from the right are the same on all ranks, and it exchanges `(n, r)` sums and one number. Of a stack of matrices each
    rank has whole ones, and nothing is exchanged.

    Args:
        gradient: this rank's rows, in the dtype to compute in.
        shards: how rows are divided.
        rank: columns; at most the shorter side of the whole.
        proj_type: one of `PROJ_TYPES`.
        old: the basis until now; its left columns are of this rank's rows.
        key: what the random columns depend on.
    """
    rank = min(rank, *shards.shape[-2:])
    add_up = shards.sum if shards.divides_matrix else None

    def find(matrix: torch.Tensor, before: torch.Tensor | None, side: str) -> torch.Tensor:
        are_divided = side == "left" or not shards.divides_matrix
        start, iterations = before, WARM_ITERATIONS
        if start is None or start.shape[-1] != rank:
            length = shards.shape[-2] if side == "left" else shards.shape[-1]
            start, iterations = seeded_normal((*shards.shape[:-2], length, rank), matrix, (*key, side)), COLD_ITERATIONS
            start = shards.part_of(start).clone() if are_divided else start
            if before is not None:  # another rank than before: what is there is kept
                kept = min(rank, before.shape[-1])
                start[..., :kept] = before[..., :kept]
            start = orthonormalise(start, add_up if are_divided else None)
        for _ in range(iterations):
            start = _iterate(matrix, start, add_up, are_divided=are_divided)
        return start

    wants_left, wants_right = sides(shards.shape, proj_type)
    left = find(gradient, None if old is None else old.left, "left") if wants_left else None
    right = find(gradient.mT, None if old is None else old.right, "right") if wants_right else None
    return Basis(left, right)


def is_divided(name: str, shards: Shards, names: Container[str]) -> bool:
    """Whether a tensor of a parameter's state has the parameter's rows; the others are the same on all ranks.

    Left columns have the rows of a matrix, and what is remembered of a projection that is not from the left, but for
    means over its rows.
    """
    if not shards.divides_matrix:
        return True
    return name == "basis_left" or (name not in _NOT_OF_ROWS and "basis_left" not in names)


def _iterate(matrix: torch.Tensor, columns: torch.Tensor, add_up: Sum | None, *, are_divided: bool) -> torch.Tensor:
    """Make one subspace iteration, as `tr_optim.projection.basis` does.

    Where it fails, sums that all ranks have make it fail on all: they keep the old columns together.

    Args:
        matrix: its rows are those of `columns`.
        columns: those until now.
        add_up: adds up over the ranks; None where nothing is divided.
        are_divided: whether the rows of `columns` are divided, else the columns of `matrix` are.
    """
    of_inner, of_outer = (add_up, None) if are_divided else (None, add_up)
    inner = matrix.mT @ columns
    inner = _of_norm_one(inner if of_inner is None else of_inner(inner), of_outer)
    outer = matrix @ inner
    outer = _of_norm_one(outer if of_outer is None else of_outer(outer), of_inner)
    found = orthonormalise(outer.add_(columns, alpha=SHIFT), of_inner)
    is_good = found.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
    return torch.where(is_good, found, columns)


def _of_norm_one(matrix: torch.Tensor, add_up: Sum | None) -> torch.Tensor:
    norm = torch.linalg.matrix_norm(matrix, keepdim=True)
    if add_up is not None:
        norm = add_up(norm.to(torch.float64).square()).sqrt().to(norm.dtype)
    return matrix / norm.clamp(min=torch.finfo(matrix.dtype).tiny)
