"""Add up over the ranks what each has made of its rows of the gradients of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tr_optim.engine.norms import (
    estimated_norm,
    estimated_norm_of_rows,
    mixed_rows,
    sketch,
    sketch_of_rows,
    total_norm,
)
from tr_optim.engine.shards import norm_of_parts, shards_of
from tr_optim.engine.window import Window
from tr_optim.projection.basis import Basis

BasisOf = Callable[[torch.Tensor], Basis]
KeyOf = Callable[[torch.Tensor], Sequence[Any]]


def add_up_rows(window: Window, parameters: Sequence[torch.Tensor], basis_of: BasisOf, key_of: KeyOf) -> None:
    """Finish what a step's backward passes have left of gradients in shards: all ranks call it.

    Projections from the left, and sketches, are of this rank's rows until then; they travel together. The norms that
    sketches are for are estimated, for what is in a basis is known best now.

    Args:
        window: what is kept of the step's gradients.
        parameters: all that are projected, in the same order on all ranks.
        basis_of: the basis that a parameter has in this step.
        key_of: what the random numbers of a parameter depend on.
    """
    tensors, mixed, shards = [], {}, None
    for parameter in parameters:
        held = shards_of(parameter)
        if held is None or not held.divides_matrix or parameter not in window.projected:
            continue
        shards, basis, projected = held, basis_of(parameter), window.projected[parameter]
        if basis.left is not None:
            tensors.append(projected)
        if parameter in window.sketches:
            sketched = window.sketches[parameter]
            rows = projected if basis.left is None else basis.left
            mixed[parameter] = mixed_rows(rows, sketched.shape[-2], key_of(parameter), held)
            tensors += [sketched, mixed[parameter]]
    if shards is not None:
        shards.add_up(tensors)
    for parameter in parameters:
        held = shards_of(parameter)
        if held is None or parameter not in window.sketches:
            continue
        projected, sketched = window.projected[parameter], window.sketches.pop(parameter)
        basis, key = basis_of(parameter), key_of(parameter)
        if held.divides_matrix:
            norm = estimated_norm_of_rows(projected, mixed[parameter], basis, sketched, key, held)
        else:
            norm = estimated_norm(projected, basis, sketched, key)
        window.norms[parameter], window.has_estimates = norm, True


def summed(parameter: torch.Tensor, basis: Basis, projected: torch.Tensor) -> torch.Tensor:
    """Return a projection of a whole gradient, where each rank has projected its rows of it."""
    shards = shards_of(parameter)
    if shards is None or not shards.divides_matrix or basis.left is None:
        return projected
    return shards.sum(projected)


def sketch_of(parameter: torch.Tensor, gradient: torch.Tensor, rows: int, key: Sequence[Any]) -> torch.Tensor:
    """Return the sketch of a parameter's gradient; of a matrix in shards what this rank's rows add to it."""
    shards = shards_of(parameter)
    if shards is None or not shards.divides_matrix:
        return sketch(gradient, rows, key)
    return sketch_of_rows(gradient, rows, key, shards)


def norm_over_ranks(
    norms: Mapping[torch.Tensor, torch.Tensor], parameters: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return the norm of all gradients; where parameters are in shards, all ranks call it.

    Args:
        norms: of each parameter's gradient, or of this rank's rows of it.
        parameters: all there are.
        device: where the result is to be.
    """
    shards = next(filter(None, map(shards_of, parameters)), None)
    if shards is None:
        return total_norm(norms.values(), device)
    parts = [norm for parameter, norm in norms.items() if shards_of(parameter) is not None]
    whole = [norm for parameter, norm in norms.items() if shards_of(parameter) is None]
    return torch.hypot(total_norm(whole, device), norm_of_parts(parts, shards, device))
