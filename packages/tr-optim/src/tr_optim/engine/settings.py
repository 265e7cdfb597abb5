"""Define what a projected optimizer is made of: its rule, its settings, and the place of each parameter.

APOLLO and Fira use the full gradient, not its projection alone. `full_gradient_engine` makes their settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from tr_optim.engine.shards import Shards
from tr_optim.projection.basis import METHODS
from tr_optim.projection.refresh import Rotation

MODES = ("step", "deferred", "immediate")
REDUCTIONS = ("projected", "whole")
REFRESHES = ("all", "first", "all_but_first")
SCHEDULES = ("fixed", "lazy")
REFRESH_COSINE, REFRESH_WINDOW = 0.4, 5


class Rule(Protocol):
    """What an update is made of; `tr_optim.moments` has them.

    Attributes:
        decays_after: whether weight decay follows the update.
        is_elementwise: whether each number of an update depends on its own gradients only, so that a large gradient may
            be given in pieces.
    """

    decays_after: bool
    is_elementwise: bool

    def start(
        self, state: dict[str, Any], like: torch.Tensor, group: dict[str, Any], shards: Shards | None = None
    ) -> None:
        """Give a new state what the rule remembers of gradients like `like`; `shards` if they are some rows of all."""
        ...

    def rotate(self, state: dict[str, Any], rotation: Rotation) -> None:
        """Carry a state over to another basis."""
        ...

    def update(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], weights: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Return what is to be subtracted, and the rate of weight decay."""
        ...


@runtime_checkable
class RowRule(Protocol):
    """A rule that needs numbers about whole parameters, and can add them up over ranks that have some rows each."""

    def update_rows(
        self,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        weights: torch.Tensor,
        shards: Shards,
        *,
        has_rows: bool,
    ) -> tuple[torch.Tensor, Any]:
        """Return as `Rule.update` what is to be subtracted, and the rate of weight decay; all ranks call it.

        Args:
            gradient: the (projected) gradient.
            state: the parameter's state.
            group: its group.
            weights: this rank's rows.
            shards: how rows are divided.
            has_rows: whether `gradient` is of this rank's rows too, else it is the same on all ranks.
        """
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
        refresh_from: what of several micro-batches a basis is found from: `all`, the `first`, or with `all_but_first`
            all, but for a matrix's first basis.
        sketch_rows: rows that the norm is estimated by, where it must be.
        stochastic_rounding: whether weights of low precision are rounded stochastically.
        refresh: when bases are found: by a `fixed` schedule, or `lazy`; see `tr_optim.projection.refresh`.
        refresh_cosine: mean cosine of successive bases from which the gap doubles.
        refresh_window: refreshes that the mean is over.
        basis_dtype: what bases are kept in; see `tr_optim.projection.encoded`.
    """

    mode: str = "step"
    method: str = "subspace"
    rotates: bool = True
    staggers: bool = True
    keeps_signs: bool = True
    seed: int = 0
    reduction: str = "projected"
    refresh_from: str = "all"
    sketch_rows: int = 64
    stochastic_rounding: bool = False
    refresh: str = "fixed"
    refresh_cosine: float = REFRESH_COSINE
    refresh_window: int = REFRESH_WINDOW
    basis_dtype: str = "float32"


@dataclass(slots=True)  # not frozen, which would take twice the time: each step makes one for every parameter
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


FULL_GRADIENT_MODES = ("step", "immediate")


def full_gradient_engine(engine: Engine, compat: str | None, known: tuple[str | None, ...]) -> Engine:
    """Return the engine's settings, or those of `compat`, with ranks that exchange whole gradients.

    Args:
        engine: how gradients are projected.
        compat: not None for what the authors' code does: bases by svd, all in the same steps, and moments as they are.
        known: what `compat` may be.

    Raises:
        ValueError: one is not known, or cannot be.
    """
    if engine.mode == "deferred":
        raise ValueError(
            "mode='deferred' keeps projections of gradients until the step, and this update needs the gradients "
            "themselves; use mode='immediate', which applies and frees each in the backward pass, or mode='step'"
        )
    choices = (
        ("mode", engine.mode, FULL_GRADIENT_MODES),
        ("method", engine.method, METHODS),
        ("compat", compat, known),
    )
    for name, value, values in choices:
        if value not in values:
            raise ValueError(f"{name}={value!r} is not known; it is one of {', '.join(map(str, values))}")
    if compat is not None:
        engine = replace(engine, method="svd", rotates=False, staggers=False, keeps_signs=False)
    return replace(engine, reduction="whole")


def check_full_gradient_group(group: dict[str, Any], owner: str, choices: Mapping[str, tuple[str, ...]]) -> None:
    """Raise where options of a projected group are not known or out of range.

    Args:
        group: a parameter group.
        owner: whose it is, for messages.
        choices: what options may be, by name.

    Raises:
        ValueError: the message says what is needed.
    """
    if not group["projects"]:
        return
    for name, known in choices.items():
        if group[name] not in known:
            raise ValueError(f"{owner}: {name}={group[name]!r} is not known; it is one of {', '.join(known)}")
    if group["proj_type"] == "full":
        raise ValueError(
            f"{owner}: proj_type='full' leaves no rows or columns to scale; use std, reverse_std, left or right"
        )
    growth = group["norm_growth"]
    if growth is not None and growth < 1:
        raise ValueError(
            f"{owner}: norm_growth={growth:g} must be at least 1, or None for no limit: with less, updates would vanish"
        )
