"""Name what a projected optimizer is made of: its rule, its settings, and the place of each parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tr_optim.projection.rotation import Rotation

MODES = ("step", "deferred", "immediate")
REDUCTIONS = ("projected", "whole")
REFRESHES = ("all", "first")


class Rule(Protocol):
    """What an update is made of; `tr_optim.moments` has them.

    Attributes:
        decays_after: whether weight decay follows the update.
        is_elementwise: whether each number of an update depends on its own gradients only, so that a large gradient may
            be given in pieces.
    """

    decays_after: bool
    is_elementwise: bool

    def start(self, state: dict[str, Any], like: torch.Tensor, group: dict[str, Any]) -> None:
        """Give a new state what the rule remembers of gradients like `like`."""
        ...

    def rotate(self, state: dict[str, Any], rotation: Rotation) -> None:
        """Carry a state over to another basis."""
        ...

    def update(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], weights: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Return what is to be subtracted, and the rate of weight decay."""
        ...


@dataclass(frozen=True)
class Engine:
    """How projected gradients are made and applied.

    Attributes:
        mode: `step` projects what the backward pass left in `.grad`; `deferred` projects in hooks and applies in
            `step`; `immediate` applies in hooks.
        method: `subspace` or `svd`; see `tr_optim.projection.basis.find_basis`.
        rotates: whether moments are carried over to a new basis, or stay as they are.
        staggers: whether matrices take turns in finding a new basis.
        keeps_signs: whether singular vectors are given a sign of their own.
        seed: of random bases and sketches.
        reduction: what ranks exchange: `projected` gradients, or `whole` ones.
        refresh_from: what of several micro-batches a basis is found from, `all` or the `first`.
        sketch_rows: rows that the norm is estimated by, where it must be.
    """

    mode: str = "step"
    method: str = "subspace"
    rotates: bool = True
    staggers: bool = True
    keeps_signs: bool = True
    seed: int = 0
    reduction: str = "projected"
    refresh_from: str = "all"
    sketch_rows: int = 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter is: its group, its number among all, and among those projected, of which there are `count`."""

    group: dict[str, Any]
    index: int
    turn: int
    count: int

    @property
    def is_projected(self) -> bool:
        """Whether its gradient is projected."""
        return self.group["projects"]
