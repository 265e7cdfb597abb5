"""Find a low-rank basis of a gradient of which each rank holds some rows, without gathering it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tr_optim.engine.shards import Shards
from tr_optim.projection.basis import (
    COLD_ITERATIONS,
    SHIFT,
    WARM_ITERATIONS,
    Basis,
    find_basis,
    fresh_columns,
    orthonormalise,
    seeded_normal,
    sides,
)

_NOT_OF_ROWS = ("basis_right", "basis_right_scales", "exp_avg_sq_col")
_IN_NO_LAYOUT = ("refreshed", "overlaps")  # of tr_optim.projection.refresh.LazyRefresh

Sum = Callable[[torch.Tensor], torch.Tensor]


def find_basis_of_rows(
    gradient: torch.Tensor,
    shards: Shards,
    rank: int,
    proj_type: str,
    old: Basis | None = None,
    *,
    key: Sequence[object],
    method: str = "subspace",
    keeps_signs: bool = True,
) -> Basis:
    """Return the basis that `find_basis` finds for the whole gradient, within rounding. Collective.

    Left columns are divided like the rows, and an iteration exchanges `(n, r)` sums and three small ones. Right columns
    are the same on all ranks, and an iteration exchanges `(n, r)` sums and one number. `svd` gathers the whole gradient
    of this one matrix on every rank. Of a stack each rank has whole matrices, and nothing is exchanged.

    Args:
        gradient: this rank's rows, in the dtype to compute in.
        shards: how rows are divided.
        rank: columns; at most the shorter side of the whole.
        proj_type: one of `PROJ_TYPES`.
        old: the old basis; its left columns have this rank's rows.
        key: seed of the random columns.
        method: one of `tr_optim.projection.basis.METHODS`.
        keeps_signs: see `find_basis`.
    """
    rank = min(rank, *shards.shape[-2:])
    if method == "svd":
        return _singular_of_rows(gradient, shards, rank, proj_type, old, keeps_signs)
    add_up = shards.sum if shards.divides_matrix else None

    def find(matrix: torch.Tensor, before: torch.Tensor | None, side: str) -> torch.Tensor:
        are_divided = side == "left" or not shards.divides_matrix
        shape = (*shards.shape[:-2], shards.shape[-2] if side == "left" else shards.shape[-1], rank)

        def held(drawn: torch.Tensor) -> torch.Tensor:
            return shards.part_of(drawn).clone() if are_divided else drawn

        if before is not None and before.shape[-1] == rank:
            kept, iterations = before, WARM_ITERATIONS
            fresh = fresh_columns(shape, matrix, (*key, side))
            columns = before + (held(fresh) if shards.divides_matrix else fresh)
        else:
            columns, iterations = held(seeded_normal(shape, matrix, (*key, side))), COLD_ITERATIONS
            if before is not None:  # another rank than before: what is there is kept
                number = min(rank, before.shape[-1])
                columns[..., :number] = before[..., :number]
            columns = kept = orthonormalise(columns, add_up if are_divided else None)
        for _ in range(iterations):
            columns = kept = _iterate(matrix, columns, kept, add_up, are_divided=are_divided)
        return kept

    wants_left, wants_right = sides(shards.shape, proj_type)
    left = find(gradient, None if old is None else old.left, "left") if wants_left else None
    right = find(gradient.mT, None if old is None else old.right, "right") if wants_right else None
    return Basis(left, right)


def _singular_of_rows(
    gradient: torch.Tensor, shards: Shards, rank: int, proj_type: str, old: Basis | None, keeps_signs: bool
) -> Basis:
    is_matrix = shards.divides_matrix
    laid_out: Any = shards.distributed(gradient, is_divided=True) if is_matrix else None
    whole = gradient if laid_out is None else laid_out.full_tensor()
    found = find_basis(whole, rank, proj_type, method="svd", keeps_signs=keeps_signs)
    left, right = found.left, found.right
    if left is not None and is_matrix:
        left = shards.part_of(left).clone()
    if old is not None and old.rank == rank:
        is_finite = whole.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True)
        left = left if left is None or old.left is None else torch.where(is_finite, left, old.left)
        right = right if right is None or old.right is None else torch.where(is_finite, right, old.right)
    return Basis(left, right)


def is_divided(name: str, shards: Shards, group: Mapping[str, Any]) -> bool | None:
    """Whether a tensor of a parameter's state has the parameter's rows; others are the same on all ranks.

    None for tensors without a layout, which are read on the host to decide whether a basis is due.

    Left columns have the rows of a matrix. So have the moments of a projection that is not from the left, except for
    means over its rows.

    Args:
        name: of the tensor.
        shards: how the parameter's rows are divided.
        group: the parameter's group, with the options of its projection; without `projects` it has none.
    """
    if name in _IN_NO_LAYOUT:
        return None
    if not shards.divides_matrix:
        return True
    is_from_left = group.get("projects", False) and sides(shards.shape, group["proj_type"])[0]
    return name == "basis_left" or (name not in _NOT_OF_ROWS and not is_from_left)


def _iterate(
    matrix: torch.Tensor, columns: torch.Tensor, kept: torch.Tensor, add_up: Sum | None, *, are_divided: bool
) -> torch.Tensor:
    """Make one subspace iteration, as `tr_optim.projection.basis` does.

    It fails on all ranks or on none, because they have the same sums. Then, and if the gradient is zero, all keep the
    old columns.

    Args:
        matrix: its rows are those of `columns`.
        columns: the columns to start with.
        kept: the old columns.
        add_up: sums over the ranks; None if nothing is divided.
        are_divided: whether the rows of `columns` are divided; otherwise the columns of `matrix` are.
    """
    of_inner, of_outer = (add_up, None) if are_divided else (None, add_up)
    inner = matrix.mT @ columns
    inner, norm = _of_norm_one(inner if of_inner is None else of_inner(inner), of_outer)
    outer = matrix @ inner
    outer, _ = _of_norm_one(outer if of_outer is None else of_outer(outer), of_inner)
    found = orthonormalise(outer.add_(columns, alpha=SHIFT), of_inner)
    is_good = found.isfinite().all(dim=-1, keepdim=True).all(dim=-2, keepdim=True) & (norm > 0)
    return torch.where(is_good, found, kept)


def _of_norm_one(matrix: torch.Tensor, add_up: Sum | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix divided by its norm, and the norm."""
    norm = torch.linalg.matrix_norm(matrix, keepdim=True)
    if add_up is not None:
        norm = add_up(norm.to(torch.float64).square()).sqrt().to(norm.dtype)
    return matrix / norm.clamp(min=torch.finfo(matrix.dtype).tiny), norm
