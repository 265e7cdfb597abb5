"""Take over a saved state only where the optimizer can go on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tr_optim.engine.settings import Rule
from tr_optim.projection.basis import projected_shape

Groups = Sequence[Mapping[str, Any]]


def completed(saved: Groups, own: Groups) -> list[dict[str, Any]]:
    """Return saved groups with those options that they lack as the optimizer's own groups have them."""
    lacking = [{name: value for name, value in group.items() if name != "params"} for group in own]
    lacking += [{}] * (len(saved) - len(own))  # torch says what is wrong with their number
    return [{**options, **group} for options, group in zip(lacking, saved, strict=False)]


def are_alike(saved: Groups, own: Groups) -> bool:
    """Whether groups are of the same sizes."""
    return [len(group["params"]) for group in saved] == [len(group["params"]) for group in own]


def check_moments(
    saved: Mapping[str, Any], parameter: torch.Tensor, group: dict[str, Any], rule: Rule, owner: str
) -> None:
    """Raise where a saved state lacks what a rule remembers.

    Args:
        saved: the state of a parameter.
        parameter: whose it is.
        group: its group, with all options.
        rule: what is to go on with it.
        owner: the optimizer, for the message.

    Raises:
        ValueError: the message says what is missing.
    """
    shape = parameter.shape
    projected = projected_shape(shape, group["rank"], group["proj_type"]) if group["projects"] else shape
    needed: dict[str, Any] = {"step": None}
    rule.start(needed, torch.empty(projected, device="meta"), group)
    # Scales are no moments: float32 ones become codes.
    missing = [name for name in needed if name not in saved and not name.endswith("_scale")]
    if missing:
        raise ValueError(
            f"the saved optimizer state of a parameter of shape {tuple(shape)} has {', '.join(sorted(saved))}, and "
            f"{owner} needs {', '.join(missing)} too: another optimizer saved it; resume with that one, or begin with "
            "a new state"
        )
