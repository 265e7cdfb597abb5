"""Settings of optimizers whose updates are made of the whole gradient, not of its projection alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tr_optim.engine.settings import Engine
from tr_optim.projection.basis import METHODS

MODES = ("step", "immediate")


def whole_engine(engine: Engine, compat: str | None, known: tuple[str | None, ...]) -> Engine:
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
    choices = (("mode", engine.mode, MODES), ("method", engine.method, METHODS), ("compat", compat, known))
    for name, value, values in choices:
        if value not in values:
            raise ValueError(f"{name}={value!r} is not known; it is one of {', '.join(map(str, values))}")
    if compat is not None:
        engine = replace(engine, method="svd", rotates=False, staggers=False, keeps_signs=False)
    return replace(engine, reduction="whole")


def check_whole_group(group: dict[str, Any], owner: str, choices: Mapping[str, tuple[str, ...]]) -> None:
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
