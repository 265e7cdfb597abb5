"""Keep the bases that parameters are projected on: read them from a state, say when one is due, find it, store it."""

from __future__ import annotations

from typing import Any

import torch

from tr_optim.engine.reduction import Averaging
from tr_optim.engine.settings import Engine, Place
from tr_optim.projection.basis import Basis, find_basis, sides
from tr_optim.projection.refresh import is_due

State = dict[str, Any]


class Bases:
    """The bases of projected parameters, as tensors in their states.

    Args:
        engine: how bases are found, and when.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def current(self, parameter: torch.Tensor, state: State, place: Place) -> Basis | None:
        """Return a parameter's basis, or None before the first and where there is no projection."""
        if "basis_left" not in state and "basis_right" not in state:
            return None
        return Basis(state.get("basis_left"), state.get("basis_right"))

    def is_due(self, parameter: torch.Tensor, state: State, place: Place) -> bool:
        """Whether a projected parameter finds a basis in this step: it has none, one of another rank, or by turns.

        Raises:
            ValueError: its state is for the other side.
        """
        basis, group = self.current(parameter, state, place), place.group
        if basis is None:
            return True
        if (basis.left is not None, basis.right is not None) != sides(parameter.shape, group["proj_type"]):
            raise ValueError(
                f"proj_type={group['proj_type']!r} projects a parameter of shape {tuple(parameter.shape)} from another "
                "side than its state was made for; go on with the proj_type that it was saved with"
            )
        if basis.rank != min(group["rank"], *parameter.shape[-2:]):
            return True
        gap = group["update_proj_gap"]
        return is_due(int(state["step"]), gap, index=place.turn, count=place.count, staggers=self._engine.staggers)

    def find(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        place: Place,
        average: Averaging | None,
    ) -> Basis:
        """Return the basis of a gradient; with `average` that of the mean over the ranks."""
        if self._engine.method == "svd" and average is not None:
            gradient, average = average(gradient.contiguous()), None
        return find_basis(
            gradient,
            place.group["rank"],
            place.group["proj_type"],
            self.current(parameter, state, place),
            method=self._engine.method,
            key=self.random_key(state, place),
            average=average,
            keeps_signs=self._engine.keeps_signs,
        )

    def store(self, state: State, basis: Basis) -> None:
        """Put a basis into a state."""
        named = {"basis_left": basis.left, "basis_right": basis.right}
        state.update({name: columns for name, columns in named.items() if columns is not None})

    def random_key(self, state: State, place: Place) -> tuple[int, int, int]:
        """Return what a parameter's random numbers of this step depend on: equal on all ranks, after a resume too."""
        return self._engine.seed, place.index, int(state["step"]) if "step" in state else 0
