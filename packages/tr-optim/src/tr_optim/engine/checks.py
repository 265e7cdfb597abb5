"""Check parameter groups, gradients, shards and saved states, and refuse what an optimizer cannot use.

A group that is refused is removed again, so the optimizer stays as it was. A saved state is checked as a whole before
any of it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from itertools import chain
from typing import Any, TypeVar, cast

import torch

from tr_optim.engine.settings import Projection, RowRule, Rule
from tr_optim.engine.shards import sharded_parameters
from tr_optim.projection.basis import PROJ_TYPES, projected_shape, sides

Add = TypeVar("Add", bound=Callable[..., None])


def all_or_nothing(add: Add) -> Add:
    """Return an `add_param_group` that removes the group again if it raises.

    Checks need the group with all its options, which torch fills in when it adds it.
    """

    @wraps(add)
    def add_or_take_back(self: Any, param_group: dict[str, Any]) -> None:
        before = len(self.param_groups)
        try:
            add(self, param_group)
        except BaseException:
            del self.param_groups[before:]
            raise

    return cast("Add", add_or_take_back)


def check_group(group: dict[str, Any], owner: str) -> None:
    """Raise if a group's options are out of range, or its parameters cannot be projected.

    Raises:
        ValueError: the message says what is needed.
    """
    rank, gap, scale, proj_type = (group[name] for name in ("rank", "update_proj_gap", "scale", "proj_type"))
    if not group["projects"]:
        return
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f"{owner}: rank={rank!r} must be a whole number from 1: directions to project on")
    if isinstance(gap, bool) or not isinstance(gap, int) or gap < 1:
        raise ValueError(f"{owner}: update_proj_gap={gap!r} must be a whole number from 1: steps between two bases")
    if scale <= 0:
        raise ValueError(f"{owner}: scale={scale:g} must be positive: a share of the learning rate")
    if proj_type not in PROJ_TYPES:
        raise ValueError(f"{owner}: proj_type={proj_type!r} is not known; it is one of {', '.join(PROJ_TYPES)}")
    for parameter in group["params"]:
        _check_projectable(parameter, owner)


def check_real(parameters: Sequence[torch.Tensor], owner: str) -> None:
    """Raise if a parameter is complex.

    Raises:
        ValueError: one is; their second moments would be wrong.
    """
    for parameter in parameters:
        if parameter.is_complex():
            shape = tuple(parameter.shape)
            raise ValueError(f"{owner}: a parameter of shape {shape} is complex; only real ones can be updated")


def _check_projectable(parameter: torch.Tensor, owner: str) -> None:
    check_real([parameter], owner)
    shape = tuple(parameter.shape)
    if parameter.dim() == 1:
        raise ValueError(
            f"{owner}: a parameter of shape {shape} has one dimension, and a projection needs rows and columns. If it "
            "is a bias or a norm's scale, put it into a group without a rank; if it is a part of flattened weights, as "
            "FSDP1 and ZeRO make them, there is no matrix to project: train with replicas (strategy='ddp')"
        )
    if parameter.dim() not in (2, 3) or parameter.numel() == 0:
        raise ValueError(
            f"{owner}: a parameter of shape {shape} is neither a matrix nor a stack of matrices; put it into a group "
            "without a rank"
        )


def check_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Raise if a gradient is of a kind that is not projected.

    Raises:
        RuntimeError: the message says what is needed.
    """
    shape = tuple(parameter.shape)
    if gradient.is_sparse:
        raise RuntimeError(f"a gradient of shape {shape} is sparse; it must be dense (nn.Embedding: sparse=False)")
    if gradient.shape != parameter.shape:
        raise RuntimeError(
            f"the gradient of a parameter of shape {shape} has the shape {tuple(gradient.shape)}: a part of flattened "
            "gradients, as ZeRO and FSDP1 make them, is not a matrix to project; train with replicas (strategy='ddp')"
        )
    if getattr(gradient, "placements", None) != getattr(parameter, "placements", None):
        raise RuntimeError(
            f"the gradient of a parameter of shape {shape} is laid out over the ranks in another way than the "
            "parameter; it must be there as fully_shard leaves it, added up and divided by rows"
        )


def check_saved_state(saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
    """Raise if a saved state does not fit its parameter and the projection that its group asks for.

    Raises:
        ValueError: the message says in what.
    """
    shape = tuple(parameter.shape)
    bases = [name for name in ("basis_left", "basis_right") if name in saved]
    left, right = sides(shape, group["proj_type"]) if group["projects"] else (False, False)
    wanted = ["basis_left"] * left + ["basis_right"] * right
    if bases != wanted:
        raise ValueError(
            f"the saved optimizer state of a parameter of shape {shape} has {' and '.join(bases) or 'no basis'}, and "
            f"{' and '.join(wanted) or 'none'} is needed; resume with the model, target modules and proj_type that it "
            "was saved with"
        )
    if "exp_avg" in saved:
        _check_shape(saved, "exp_avg", _gradient_shape(saved, parameter, group), parameter)


def refuse_codes(saved: dict[str, Any], parameter: torch.Tensor) -> None:
    """Raise if a saved state has moments in 8 bits.

    Raises:
        ValueError: the message says what can load it.
    """
    if "exp_avg_scale" in saved:
        raise ValueError(
            f"the saved optimizer state of a parameter of shape {tuple(parameter.shape)} has moments in 8 bits; load "
            "it into the class that saved it (GaLoreAdamW8bit, AdamW8bit), or begin with new moments"
        )


def refuse_late_clipping(max_norm: float | None, used: float | None, *, can_clip: bool) -> None:
    """Raise if updates that were made in the backward pass are to be clipped.

    Args:
        max_norm: what they are to be clipped to, or None.
        used: what they were clipped to, or None.
        can_clip: whether they could have been.

    Raises:
        ValueError: `max_norm` is another than `used`.
    """
    if max_norm is None or max_norm == used:
        return
    what_to_do = "use mode='deferred', or no clipping (max_grad_norm=0)"
    if can_clip:
        what_to_do = f"call clip_to({max_norm:g}) before the step's backward passes, or use mode='step'"
    raise ValueError(
        f"max_norm={max_norm:g} cannot be held with mode='immediate', which updates before the norm is known; "
        f"{what_to_do}"
    )


_REPLICAS = "train with replicas (strategy='ddp')"


def check_shards(groups: Sequence[Mapping[str, Any]], owner: str, projection: Projection, rule: Rule) -> None:
    """Raise if groups, projected or not, have parameters in shards, and their optimizer cannot update parts.

    Raises:
        ValueError: the message says what to change.
    """
    takes = rule.is_elementwise or isinstance(rule, RowRule)
    instead = f"and what its rule needs of whole ones is not built over parts; {_REPLICAS}, or use GaLoreAdamW"
    parameters = chain.from_iterable(group["params"] for group in groups)
    sharded = sharded_parameters(parameters, owner, takes=takes, instead=instead)
    if not sharded or projection.basis_dtype in ("float32", "bfloat16"):
        return
    projected = ((parameter, group) for group in groups if group["projects"] for parameter in group["params"])
    for parameter, group in projected:
        shape = parameter.shape
        if id(parameter) in sharded and (len(shape) > 2 or sides(shape, group["proj_type"])[0]):
            raise ValueError(
                f"{owner}: the rows of a parameter of shape {tuple(shape)} are divided over ranks, and with them its "
                f"basis, of whose codes with basis_dtype={projection.basis_dtype!r} one block would lie on several; "
                "use proj_type='right', whose basis is of columns (not for stacks of matrices), basis_dtype='float32' "
                f"or 'bfloat16', or {_REPLICAS}"
            )


Groups = Sequence[Mapping[str, Any]]
State = dict[str, Any]
Check = Callable[[State, torch.Tensor, dict[str, Any]], None]


def checked_state_dict(
    state_dict: dict[str, Any], own: Groups, check: Check
) -> tuple[dict[str, Any], list[State | None]]:
    """Check a whole saved state before any of it is loaded.

    Args:
        state_dict: the `state_dict` of an optimizer.
        own: groups of the optimizer that loads it.
        check: called with the saved state of a parameter, the parameter, and its saved group; raises.

    Returns:
        The state, with missing options of its groups taken from the optimizer's own; and the saved state of each
        parameter, in their order, None where there is none.
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
    """Raise if a saved state lacks moments of a rule, or has them in other shapes.

    Args:
        saved: the state of a parameter.
        parameter: the parameter.
        group: its group, with all options.
        rule: the rule that will use it.
        owner: the optimizer, for the message.

    Raises:
        ValueError: the message says what is missing or does not fit.
    """
    needed: State = {}
    rule.start(needed, torch.empty(_gradient_shape(saved, parameter, group), device="meta"), group)
    # Scales are not moments: float32 ones become codes.
    moments = {name: value.shape for name, value in needed.items() if not name.endswith("_scale")}
    check_shapes(saved, moments, parameter, owner)


def refuse_any_state(owner: str) -> Check:
    """Return a check that refuses any saved state, for an optimizer without one."""

    def refuse(saved: State, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        raise ValueError(
            f"the saved optimizer state of a parameter of shape {tuple(parameter.shape)} has "
            f"{', '.join(sorted(saved))}, which {owner} would keep in memory and not use; resume with the optimizer "
            "that saved it, or start with a new state"
        )

    return refuse


def check_names(saved: State, needed: Sequence[str], parameter: torch.Tensor, owner: str) -> None:
    """Raise if a saved state lacks something.

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
    """Raise if a saved state lacks something, or has it in another shape.

    Raises:
        ValueError: the message says what.
    """
    check_names(saved, ["step", *needed], parameter, owner)
    for name, shape in needed.items():
        _check_shape(saved, name, shape, parameter)


def _check_shape(saved: State, name: str, needed: Sequence[int], parameter: torch.Tensor) -> None:
    if tuple(saved[name].shape) != tuple(needed):
        raise ValueError(
            f"the saved optimizer state does not fit the model: {name} of a parameter of shape "
            f"{tuple(parameter.shape)} has the shape {tuple(saved[name].shape)}, and {tuple(needed)} is needed; "
            "resume with the model that it was saved with"
        )


def _gradient_shape(saved: State, parameter: torch.Tensor, group: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the (projected) gradients that a saved state is of."""
    if not group["projects"]:
        return tuple(parameter.shape)
    bases = [saved[name] for name in ("basis_left", "basis_right") if name in saved]
    rank = bases[0].shape[-1] if bases else group["rank"]  # a new one of the group counts from the next basis on
    return projected_shape(parameter.shape, rank, group["proj_type"])
