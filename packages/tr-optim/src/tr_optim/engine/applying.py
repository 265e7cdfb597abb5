"""Apply a parameter's gradient, or its projection, to the parameter and its state."""

from __future__ import annotations

from typing import Any

import torch

from tr_optim.engine.bases import Bases, State
from tr_optim.engine.chunks import chunks, computing_dtype
from tr_optim.engine.refusals import check_gradient
from tr_optim.engine.returning import Returning
from tr_optim.engine.settings import Place, Rule
from tr_optim.projection.basis import Basis
from tr_optim.projection.rotation import Rotation


def prepared(parameter: torch.Tensor, gradient: torch.Tensor, inverse_scale: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient in the dtype that is computed in, without its loss's scale; refuse what is not projected."""
    check_gradient(parameter, gradient)
    gradient = gradient.to(computing_dtype(parameter))
    return gradient if inverse_scale is None else gradient.mul_(inverse_scale)


class Applying:
    """Make updates of gradients.

    Args:
        rule: how an update is made of a (projected) gradient.
        bases: where the bases are.
        returning: how a projected update changes the weights.
        rotates: whether moments are carried over to a new basis.
    """

    def __init__(self, rule: Rule, bases: Bases, returning: Returning, *, rotates: bool) -> None:
        self._rule, self._bases, self._returning, self._rotates = rule, bases, returning, rotates

    def __call__(
        self,
        parameter: torch.Tensor,
        state: State,
        place: Place,
        gradient: torch.Tensor,
        fresh: Basis | None = None,
        whole: torch.Tensor | None = None,
    ) -> None:
        """Update a parameter and its state.

        Args:
            parameter: whose weights change.
            state: its state, empty before the first update.
            place: its group.
            gradient: its gradient, or the projection of that; it may be changed.
            fresh: the basis from now on; None keeps the one in `state`.
            whole: the gradient of a projected parameter, where `returning` needs it; it may be changed.
        """
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float64)  # on the CPU, where reading it costs nothing
            self._rule.start(state, gradient, place.group)
        if fresh is not None:
            self._change_basis(parameter, state, place, fresh)
        state["step"] += 1
        basis = self._bases.current(parameter, state, place)
        if basis is None and self._rule.is_elementwise:
            self._update_in_pieces(parameter, state, place.group, gradient)
        else:
            self._update(parameter, state, place.group, gradient, basis, whole)

    def _change_basis(self, parameter: torch.Tensor, state: State, place: Place, fresh: Basis) -> None:
        old = self._bases.current(parameter, state, place)
        if old is not None and (self._rotates or old.rank != fresh.rank):
            self._rule.rotate(state, Rotation(old, fresh))
        self._bases.store(state, fresh)

    def _update(
        self,
        parameter: torch.Tensor,
        state: State,
        group: dict[str, Any],
        gradient: torch.Tensor,
        basis: Basis | None,
        whole: torch.Tensor | None,
    ) -> None:
        rule, decay = self._rule, group["weight_decay"]
        weights = parameter.to(computing_dtype(parameter))  # the parameter itself, unless it is of low precision
        update, rate = rule.update(gradient, state, group, weights)
        if decay and not rule.decays_after:
            weights.mul_(1 - rate * decay)
        if basis is None:
            weights.sub_(update)
        else:
            projected = gradient if self._returning.needs_whole else None
            self._returning.subtract(weights, update, basis, group, state, projected=projected, whole=whole)
        if decay and rule.decays_after:
            weights.mul_(1 - rate * decay)
        if weights is not parameter:
            parameter.copy_(weights)

    def _update_in_pieces(
        self, parameter: torch.Tensor, state: State, group: dict[str, Any], gradient: torch.Tensor
    ) -> None:
        """Update without a second tensor of the parameter's size, which may be an embedding."""
        rule, decay = self._rule, group["weight_decay"]
        names = [name for name in state if name != "step"]
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
