"""Find a parameter's basis when it is due, and apply its projected gradient."""

from __future__ import annotations

from typing import Any

import torch

from tr_optim.engine.chunks import chunks, computing_dtype
from tr_optim.engine.reduction import Averaging
from tr_optim.engine.refusals import check_gradient
from tr_optim.engine.settings import Engine, Place, Rule
from tr_optim.projection.basis import Basis, find_basis, sides
from tr_optim.projection.refresh import is_due
from tr_optim.projection.rotation import Rotation

State = dict[str, Any]


def prepared(parameter: torch.Tensor, gradient: torch.Tensor, inverse_scale: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient in the dtype that is computed in, without its loss's scale; refuse what is not projected."""
    check_gradient(parameter, gradient)
    gradient = gradient.to(computing_dtype(parameter))
    return gradient if inverse_scale is None else gradient.mul_(inverse_scale)


def needs_basis(parameter: torch.Tensor, state: State, place: Place, engine: Engine) -> bool:
    """Whether a projected parameter finds a basis in this step: it has none, has one of another rank, or by turns.

    Raises:
        ValueError: its state is for the other side.
    """
    basis, group = basis_of(state), place.group
    if basis is not None and (basis.left is not None, basis.right is not None) != sides(
        parameter.shape, group["proj_type"]
    ):
        raise ValueError(
            f"proj_type={group['proj_type']!r} projects a parameter of shape {tuple(parameter.shape)} from another "
            "side than its state was made for; go on with the proj_type that it was saved with"
        )
    if basis is None or basis.rank != min(group["rank"], *parameter.shape[-2:]):
        return True
    gap = group["update_proj_gap"]
    return is_due(int(state["step"]), gap, index=place.turn, count=place.count, staggers=engine.staggers)


def new_basis(gradient: torch.Tensor, state: State, place: Place, engine: Engine, average: Averaging | None) -> Basis:
    """Return the basis of a gradient; with `average` that of the mean over the ranks."""
    if engine.method == "svd" and average is not None:
        gradient, average = average(gradient.contiguous()), None
    return find_basis(
        gradient,
        place.group["rank"],
        place.group["proj_type"],
        basis_of(state),
        method=engine.method,
        key=random_key(state, place, engine),
        average=average,
        keeps_signs=engine.keeps_signs,
    )


def random_key(state: State, place: Place, engine: Engine) -> tuple[int, int, int]:
    """Return what a parameter's random numbers of this step depend on: the same on all ranks, and after a resume."""
    return engine.seed, place.index, int(state["step"]) if "step" in state else 0


def apply_update(
    parameter: torch.Tensor,
    state: State,
    place: Place,
    gradient: torch.Tensor,
    fresh: Basis | None,
    rule: Rule,
    *,
    rotates: bool,
) -> None:
    """Update a parameter and its state.

    Args:
        parameter: whose weights change.
        state: its state, empty before the first update.
        place: its group.
        gradient: its gradient, or the projection of that; it may be changed.
        fresh: the basis from now on; None keeps the one in `state`.
        rule: how an update is made.
        rotates: whether moments are carried over to `fresh`.
    """
    group, old = place.group, basis_of(state)
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float64)  # on the CPU, where reading it costs nothing
        rule.start(state, gradient, group)
    if fresh is not None:
        if old is not None and (rotates or old.rank != fresh.rank):
            rule.rotate(state, Rotation(old, fresh))
        named = {"basis_left": fresh.left, "basis_right": fresh.right}
        state.update({name: columns for name, columns in named.items() if columns is not None})
    state["step"] += 1
    basis = basis_of(state)
    if basis is None and rule.is_elementwise:
        _apply_in_pieces(parameter, state, group, gradient, rule)
        return
    weights = parameter.to(computing_dtype(parameter))  # the parameter itself, unless it is of low precision
    update, rate = rule.update(gradient, state, group, weights)
    decay = group["weight_decay"]
    if decay and not rule.decays_after:
        weights.mul_(1 - rate * decay)
    _subtract(weights, update, basis, group["scale"])
    if decay and rule.decays_after:
        weights.mul_(1 - rate * decay)
    if weights is not parameter:
        parameter.copy_(weights)


def _apply_in_pieces(
    parameter: torch.Tensor, state: State, group: dict[str, Any], gradient: torch.Tensor, rule: Rule
) -> None:
    """Update without a second tensor of the parameter's size, which may be an embedding."""
    names = [name for name in state if name != "step"]
    decay = group["weight_decay"]
    for piece, gradient_piece, *moments in chunks(parameter, gradient, *(state[name] for name in names)):
        own = {"step": state["step"], **dict(zip(names, moments, strict=True))}
        weights = piece.to(computing_dtype(parameter))
        update, rate = rule.update(gradient_piece, own, group, weights)
        if decay and not rule.decays_after:
            weights.mul_(1 - rate * decay)
        weights.sub_(update)
        if decay and rule.decays_after:
            weights.mul_(1 - rate * decay)
        if weights is not piece:
            piece.copy_(weights)


def basis_of(state: State) -> Basis | None:
    """Return the basis in a state, or None."""
    if "basis_left" not in state and "basis_right" not in state:
        return None
    return Basis(state.get("basis_left"), state.get("basis_right"))


def _subtract(weights: torch.Tensor, update: torch.Tensor, basis: Basis | None, scale: float) -> None:
    """Subtract an update, projected back if there is a basis, without a second matrix of the weights' size."""
    if basis is None:
        weights.sub_(update)
        return
    update = update.mul_(scale)
    multiply = weights.addmm_ if weights.dim() == 2 else weights.baddbmm_
    if basis.left is not None and basis.right is not None:
        multiply(basis.left @ update, basis.right.mT, alpha=-1)
    elif basis.left is not None:
        multiply(basis.left, update, alpha=-1)
    elif basis.right is not None:
        multiply(update, basis.right.mT, alpha=-1)
