"""Define the parts of a projected optimizer: its rule, its settings, and the place of each parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict, runtime_checkable

import torch

from tr_optim.engine.shards import Shards
from tr_optim.projection.basis import METHODS
from tr_optim.projection.encoded import FORMS
from tr_optim.projection.refresh import Rotation

MODES = ("step", "deferred", "immediate")
REFRESH_COSINE, REFRESH_WINDOW = 0.4, 5
GROUP_OPTIONS = ("rank", "update_proj_gap", "scale", "proj_type")
_CHOICES = {
    "method": METHODS,
    "reduction": ("projected", "whole"),
    "refresh_from": ("all", "first"),
    "refresh": ("fixed", "lazy"),
    "basis_dtype": FORMS,
    "exchange_dtype": ("float32", "bfloat16"),
}


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


class ProjectionOptions(TypedDict, total=False):
    """The keyword arguments that GaLore, APOLLO and Fira share."""

    rank: int | None
    update_proj_gap: int
    proj_type: str
    mode: str
    rotate_moments: bool
    stagger: bool
    seed: int
    stochastic_rounding: bool
    compat: str | None


class GaLoreOptions(ProjectionOptions, total=False):
    """The keyword arguments of a projection that GaLore takes."""

    scale: float
    method: str
    reduction: str
    refresh_from: str
    exchange_dtype: str
    refresh: str
    refresh_cosine: float
    refresh_window: int
    basis_dtype: str


@dataclass(frozen=True, kw_only=True)
class Projection:
    """How gradients are projected and applied, with the defaults; `GaLoreAdamW` documents each.

    `checked` has the checks, but for those of `group_options`, which each group may have of its own: they are in
    `tr_optim.engine.checks.check_group`.
    """

    rank: int | None = None
    update_proj_gap: int = 200
    scale: float = 0.25
    proj_type: str = "std"
    mode: str = "step"
    method: str = "subspace"
    rotate_moments: bool = True
    stagger: bool = True
    seed: int = 0
    reduction: str = "projected"
    refresh_from: str = "all"
    exchange_dtype: str = "float32"
    refresh: str = "fixed"
    refresh_cosine: float = REFRESH_COSINE
    refresh_window: int = REFRESH_WINDOW
    basis_dtype: str = "float32"
    stochastic_rounding: bool = False
    compat: str | None = None

    @property
    def group_options(self) -> dict[str, Any]:
        """The defaults of a group's own options."""
        return {name: getattr(self, name) for name in GROUP_OPTIONS}

    @property
    def keeps_signs(self) -> bool:
        """Whether singular vectors get a fixed sign; in the authors' code they have any."""
        return self.compat is None

    def checked(self, compat: str, *, needs_whole: bool = False) -> Projection:
        """Return the settings that apply: with `compat`, svd, moments as they are, all bases in the same steps.

        Args:
            compat: the value of `compat` that is known, beside None.
            needs_whole: whether updates need whole gradients, which ranks then exchange.

        Raises:
            ValueError: a setting is not known, out of range or not available.
        """
        if needs_whole and self.mode == "deferred":
            raise ValueError(
                "mode='deferred' keeps projections of gradients until the step, and this update needs the gradients "
                "themselves; use mode='immediate', which applies and frees each in the backward pass, or mode='step'"
            )
        modes = tuple(mode for mode in MODES if not (needs_whole and mode == "deferred"))
        for name, known in {"mode": modes, **_CHOICES, "compat": (None, compat)}.items():
            value = getattr(self, name)
            if value not in known:
                raise ValueError(f"{name}={value!r} is not known; it is one of {', '.join(map(str, known))}")
        self._check_refresh()
        settings = replace(self, reduction="whole") if needs_whole else self
        if self.compat is None:
            return settings
        return replace(settings, method="svd", rotate_moments=False, stagger=False)

    def _check_refresh(self) -> None:
        cosine, window = self.refresh_cosine, self.refresh_window
        if not 0 < cosine <= 1:
            raise ValueError(
                f"refresh_cosine={cosine:g} must be above 0 and at most 1: a mean cosine of successive bases"
            )
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(
                f"refresh_window={window!r} must be a whole number from 1: refreshes that the mean is over"
            )
        if self.refresh == "fixed" and (cosine, window) != (REFRESH_COSINE, REFRESH_WINDOW):
            raise ValueError(
                f"refresh_cosine={cosine:g} and refresh_window={window} are of refresh='lazy', and refresh is 'fixed'; "
                "set refresh='lazy', or leave them out"
            )
        if self.compat is not None and (self.refresh, self.basis_dtype) != ("fixed", "float32"):
            raise ValueError(
                f"compat={self.compat!r} has a fixed schedule and float32 bases, and refresh={self.refresh!r} with "
                f"basis_dtype={self.basis_dtype!r} was asked for; leave out compat, or those"
            )


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
