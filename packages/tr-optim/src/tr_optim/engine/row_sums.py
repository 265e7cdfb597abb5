"""Add up over the ranks what each has made of its rows of the gradients of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from tr_optim.engine.norms import total_norm
from tr_optim.engine.shards import norm_of_parts, shards_of
from tr_optim.engine.window import Window
from tr_optim.projection.basis import Basis


def add_up_rows(window: Window, parameters: Sequence[torch.Tensor], basis_of: Callable[[torch.Tensor], Basis]) -> None:
    """Add up projections from the left of gradients in shards, which are of this rank's rows until then.

    They travel together. All ranks call it.

    Args:
        window: what is kept of the step's gradients.
        parameters: all that are projected, in the same order on all ranks.
        basis_of: the basis that a parameter has in this step.
    """
    tensors, shards = [], None
    for parameter in parameters:
        held = shards_of(parameter)
        if held is None or not held.divides_matrix or parameter not in window.projected:
            continue
        shards = held
        if is_summed(parameter, basis_of(parameter)):
            tensors.append(window.projected[parameter])
    if shards is not None:
        shards.add_up(tensors)


def is_summed(parameter: torch.Tensor, basis: Basis) -> bool:
    """Whether the projection of a gradient is a sum over ranks, each of which projects its rows."""
    shards = shards_of(parameter)
    return shards is not None and shards.divides_matrix and basis.left is not None


def projected_norm(parameter: torch.Tensor, basis: Basis, projected: torch.Tensor) -> torch.Tensor:
    """Return the norm of a projection; in shards this rank's share, the squares of all being the square of the norm."""
    shards, norm = shards_of(parameter), torch.linalg.vector_norm(projected)
    if shards is None or not is_summed(parameter, basis):
        return norm
    return norm * shards.count**-0.5  # all ranks have the same


def norm_over_ranks(
    norms: Mapping[torch.Tensor, torch.Tensor],
    rests: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """Return the norm of all gradients; where parameters are in shards, all ranks call it.

    Args:
        norms: of each parameter's gradient, or of this rank's rows of it.
        rests: norms of what is not in these, of all ranks.
        parameters: all there are.
        device: where the result is to be.
    """
    shards = next(filter(None, map(shards_of, parameters)), None)
    if shards is None:
        return total_norm([*norms.values(), *rests], device)
    parts = [norm for parameter, norm in norms.items() if shards_of(parameter) is not None]
    whole = [norm for parameter, norm in norms.items() if shards_of(parameter) is None]
    return torch.hypot(total_norm([*whole, *rests], device), norm_of_parts(parts, shards, device))
