"""Take over a saved state only where the optimizer can go on with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from tr_optim.engine.settings import Rule
from tr_optim.projection.basis import projected_shape

Groups = Sequence[Mapping[str, Any]]
State = dict[str, Any]
Check = Callable[[State, torch.Tensor, dict[str, Any]], None]


def checked(state_dict: dict[str, Any], own: Groups, check: Check) -> tuple[dict[str, Any], list[State | None]]:
    """Look at a whole saved state before anything of it is taken over.

    Args:
        state_dict: what an optimizer's `state_dict` returned.
        own: groups of the one that is to go on with it.
        check: called with the saved state of a parameter, the parameter, and its saved group; raises.

    Returns:
        The state with those options in its groups that they lack, as the optimizer's own have them; and what is saved
        of each parameter, in their order, None where nothing is.
    """
    lacking = [{name: value for name, value in group.items() if name != "params"} for group in own]
    lacking += [{}] * (len(state_dict["param_groups"]) - len(own))
    groups = [{**options, **group} for options, group in zip(lacking, state_dict["param_groups"], strict=False)]
    states = [state_dict["state"].get(number) or None for number in chain(*(group["params"] for group in groups))]
    for mine, group in zip(own, groups, strict=False):
        if "lr" in group and group["lr"] is None and "relative_step" not in mine:
            raise ValueError(
                "the saved optimizer state has the learning rate None, which stands for Adafactor's relative steps, "
                "and this optimizer makes none; resume with the optimizer that saved it, or from a state that was "
                "saved with a learning rate (relative_step=False)"
            )
    if [len(group["params"]) for group in groups] == [len(group["params"]) for group in own]:  # else torch refuses it
        placed = ((parameter, group) for mine, group in zip(own, groups, strict=True) for parameter in mine["params"])
        for saved, (parameter, group) in zip(states, placed, strict=True):
            if saved is not None:
                check(saved, parameter, group)
    return {**state_dict, "param_groups": groups}, states


def check_moments(saved: State, parameter: torch.Tensor, group: dict[str, Any], rule: Rule, owner: str) -> None:
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
    needed: State = {"step": None}
    rule.start(needed, torch.empty(projected, device="meta"), group)
    # Scales are no moments: float32 ones become codes.
    check_names(saved, [name for name in needed if not name.endswith("_scale")], parameter, owner)


def refuse_any_state(owner: str) -> Check:
    """Return what raises about any saved state, for an optimizer that has none."""

    def refuse(saved: State, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        raise ValueError(
            f"the saved optimizer state of a parameter of shape {tuple(parameter.shape)} has "
            f"{', '.join(sorted(saved))}, which {owner} would keep in memory and not use; resume with the optimizer "
            "that saved it, or begin anew"
        )

    return refuse


def check_names(saved: State, needed: Sequence[str], parameter: torch.Tensor, owner: str) -> None:
    """Raise where a saved state lacks something.

    Raises:
        ValueError: the message says what.
    """
    missing = [name for name in needed if name not in saved]
    if missing:
        raise ValueError(
            f"the saved optimizer state of a parameter of shape {tuple(parameter.shape)} has "
            f"{', '.join(sorted(saved))}, and {owner} needs {', '.join(missing)} too: another optimizer saved it; "
            "resume with that one, or begin with a new state"
        )


def check_shapes(saved: State, needed: Mapping[str, torch.Size], parameter: torch.Tensor, owner: str) -> None:
    """Raise where a saved state lacks something, or has it in another shape.

    Raises:
        ValueError: the message says what.
    """
    check_names(saved, ["step", *needed], parameter, owner)
    for name, shape in needed.items():
        if saved[name].shape != shape:
            raise ValueError(
                f"the saved optimizer state does not fit the model: {name} of a parameter of shape "
                f"{tuple(parameter.shape)} has the shape {tuple(saved[name].shape)}, and {tuple(shape)} is needed; "
                "resume with the model that it was saved with"
            )
