"""Define the parts of a projected optimizer: its rule, its settings, and the place of each parameter.

APOLLO and Fira use the full gradient, not only its projection. `full_gradient_engine` makes their settings.
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
    """Compute updates from gradients; `tr_optim.moments` has the rules.

    Attributes:
        decays_after: whether weight decay follows the update.
        is_elementwise: whether each number of an update depends only on its own gradients. Then a large gradient may be
            given in pieces.
    """

    decays_after: bool
    is_elementwise: bool

    def start(
        self, state: dict[str, Any], like: torch.Tensor, group: dict[str, Any], shards: Shards | None = None
    ) -> None:
        """Add moments for gradients like `like` to a new state; with `shards`, they are some rows of all."""
        ...

    def rotate(self, state: dict[str, Any], rotation: Rotation) -> None:
        """Rotate a state's moments to another basis."""
        ...

    def update(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], weights: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Return the update to subtract, and the rate of weight decay."""
        ...


@runtime_checkable
class RowRule(Protocol):
    """A rule that needs statistics of whole parameters, and can sum them over ranks with some rows each."""

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
        """Return the update to subtract, and the rate of weight decay, as `Rule.update`. Collective.

        Args:
            gradient: the (projected) gradient.
            state: the parameter's state.
            group: its group.
            weights: this rank's rows.
            shards: how rows are divided.
            has_rows: whether `gradient` has this rank's rows too; otherwise it is the same on all ranks.
        """
        ...


@dataclass(frozen=True)
class Engine:
    """How projected gradients are made and applied.

    Attributes:
        mode: `step` projects gradients in `.grad`; `deferred` projects in hooks and applies in `step`; `immediate`
            applies in hooks.
        method: `subspace` or `svd`; see `tr_optim.projection.basis.find_basis`.
        rotates: whether moments are rotated to a new basis, or stay as they are.
        staggers: whether matrices take turns in finding a new basis.
        keeps_signs: whether singular vectors get a fixed sign.
        seed: of random bases and sketches.
        reduction: what ranks exchange: `projected` gradients, or `whole` ones.
        refresh_from: the micro-batches that a basis is found from: `all`, the `first`, or `all_but_first`: the first
            for a matrix's first basis, later all.
        sketch_rows: rows of the sketch that estimates the norm, if needed.
        stochastic_rounding: whether weights of low precision are rounded stochastically.
        refresh: when bases are found: by a `fixed` schedule, or `lazy`; see `tr_optim.projection.refresh`.
        refresh_cosine: mean cosine of successive bases from which the gap doubles.
        refresh_window: number of refreshes in the mean.
        basis_dtype: storage dtype of bases; see `tr_optim.projection.encoded`.
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
    """Identify a parameter: its group, its number among all, and among the `count` projected ones."""

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
        compat: not None for the behaviour of the authors' code: bases by svd, all in the same steps, no rotation.
        known: the values of `compat`.

    Raises:
        ValueError: a setting is unknown or not available.
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
    """Raise if options of a projected group are not known or out of range.

    Args:
        group: a parameter group.
        owner: name of the optimizer, for messages.
        choices: the values of options, by name.

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
