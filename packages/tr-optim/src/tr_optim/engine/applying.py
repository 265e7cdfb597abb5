"""Apply a parameter's gradient, or its projection, to the parameter and its state."""

from __future__ import annotations

from typing import Any

import torch

from tr_optim.engine.bases import Bases, State
from tr_optim.engine.chunks import chunks, computing_dtype
from tr_optim.engine.refusals import check_gradient
from tr_optim.engine.returning import Returning
from tr_optim.engine.rounding import Rounding, put_back
from tr_optim.engine.settings import Place, RowRule, Rule
from tr_optim.engine.shards import Shards, local_part, shards_of
from tr_optim.engine.together import Sums, make
from tr_optim.projection.basis import Basis
from tr_optim.projection.encoded import EncodedBasis
from tr_optim.projection.rotation import Rotation


def prepared(parameter: torch.Tensor, gradient: torch.Tensor, inverse_scale: torch.Tensor | None) -> torch.Tensor:
    """Return a gradient in the dtype that is computed in, without its loss's scale; refuse what is not projected.

    Of a parameter in shards it is this rank's part.
    """
    check_gradient(parameter, gradient)
    gradient, dtype = local_part(gradient), computing_dtype(parameter)
    if gradient.dtype != dtype:
        gradient = gradient.to(dtype)
    return gradient if inverse_scale is None else gradient.mul_(inverse_scale)


class Applying:
    """Make updates of gradients.

    Args:
        rule: how an update is made of a (projected) gradient.
        bases: where the bases are.
        returning: how a projected update changes the weights.
        rounding: how weights of low precision are rounded.
        rotates: whether moments are carried over to a new basis.
    """

    def __init__(self, rule: Rule, bases: Bases, returning: Returning, rounding: Rounding, *, rotates: bool) -> None:
        self._rule, self._bases, self._returning, self._rotates = rule, bases, returning, rotates
        self._rounding = rounding

    def __call__(
        self,
        parameter: torch.Tensor,
        state: State,
        place: Place,
        gradient: torch.Tensor,
        fresh: Basis | EncodedBasis | None = None,
        whole: torch.Tensor | None = None,
    ) -> None:
        """Update a parameter and its state; all ranks that have rows of it call it."""
        make([self.steps(parameter, state, place, gradient, fresh, whole)], shards_of(parameter))

    def steps(
        self,
        parameter: torch.Tensor,
        state: State,
        place: Place,
        gradient: torch.Tensor,
        fresh: Basis | EncodedBasis | None = None,
        whole: torch.Tensor | None = None,
    ) -> Sums:
        """Update a parameter and its state, and give what is to be added up over the ranks before it goes on.

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
            basis = self._bases.current(parameter, state, place) if fresh is None else fresh.decoded()
            self._rule.start(state, gradient, place.group, _divided(parameter, basis))
        if fresh is not None:
            self._change_basis(parameter, state, place, fresh)
        basis = self._bases.current(parameter, state, place)  # that of the gradient, which may depend on the step
        state["step"] += 1
        generator = self._rounding.generator(parameter, place.index, state["step"])
        shards, parameter = shards_of(parameter), local_part(parameter)
        if basis is None and self._rule.is_elementwise:
            self._update_in_pieces(parameter, state, place.group, gradient, generator)
        else:
            how = {"generator": generator, "shards": shards}
            yield from self._update(parameter, state, place.group, gradient, basis, whole, **how)

    def _change_basis(self, parameter: torch.Tensor, state: State, place: Place, fresh: Basis | EncodedBasis) -> None:
        old = self._bases.current(parameter, state, place)
        rotation = None
        if old is not None:
            turns = self._rotates or old.rank != fresh.rank
            if turns or self._bases.measures_change:
                rotation = Rotation(old, fresh.decoded(), shards_of(parameter))
            if turns and rotation is not None:
                self._rule.rotate(state, rotation)
        self._bases.store(state, fresh)
        self._bases.note_change(parameter, state, place, rotation)

    def _update(
        self,
        parameter: torch.Tensor,
        state: State,
        group: dict[str, Any],
        gradient: torch.Tensor,
        basis: Basis | None,
        whole: torch.Tensor | None,
        *,
        generator: torch.Generator | None,
        shards: Shards | None,
    ) -> Sums:
        rule, decay = self._rule, group["weight_decay"]
        weights = parameter.to(computing_dtype(parameter))  # the parameter itself, unless it is of low precision
        if shards is not None and isinstance(rule, RowRule):
            has_rows = not shards.divides_matrix or basis is None or basis.left is None
            update, rate = rule.update_rows(gradient, state, group, weights, shards, has_rows=has_rows)
        else:
            update, rate = rule.update(gradient, state, group, weights)
        if decay and not rule.decays_after:
            weights.mul_(1 - rate * decay)
        if basis is None:
            weights.sub_(update)
        else:
            projected = gradient if self._returning.needs_whole else None
            parts = shards if shards is not None and shards.divides_matrix else None
            given = {"projected": projected, "whole": whole, "parts": parts}
            yield from self._returning.subtract(weights, update, basis, group, state, **given)
        if decay and rule.decays_after:
            weights.mul_(1 - rate * decay)
        if weights is not parameter:
            put_back(parameter, weights, generator)

    def _update_in_pieces(
        self,
        parameter: torch.Tensor,
        state: State,
        group: dict[str, Any],
        gradient: torch.Tensor,
        generator: torch.Generator | None,
    ) -> None:
        """Update without a second tensor of the parameter's size, which may be an embedding."""
        rule, decay = self._rule, group["weight_decay"]
        names = [name for name in state if name != "step"]
        for piece, gradient_piece, *moments in chunks(parameter, gradient, *(state[name] for name in names)):
            own = {"step": state["step"], **dict(zip(names, moments, strict=True))}
            weights = piece.to(computing_dtype(parameter))
            update, rate = rule.update(gradient_piece.to(weights.dtype), own, group, weights)
            if decay and not rule.decays_after:
                weights.mul_(1 - rate * decay)
            weights.sub_(update)
            if decay and rule.decays_after:
                weights.mul_(1 - rate * decay)
            if weights is not piece:
                put_back(piece, weights, generator)


def _divided(parameter: torch.Tensor, basis: Basis | None) -> Shards | None:
    """Return how the rows of a parameter's (projected) gradients are divided; None where all ranks have the same."""
    shards = shards_of(parameter)
    if shards is None or basis is None or not shards.divides_matrix:
        return shards
    return None if basis.left is not None else shards
