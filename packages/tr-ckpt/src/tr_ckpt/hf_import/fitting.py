"""Fit a state of another program to the model, optimizer or schedule that loads it, or say why it does not fit.

Tied weights that a file leaves out are added. A state of another model, optimizer or schedule is
refused.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn

from tr_ckpt.errors import CheckpointError, first_three

logger = logging.getLogger(__name__)

# Buffers that older versions of transformers saved and newer ones compute.
_COMPUTED_BUFFERS = (r"(^|\.)position_ids$", r"(^|\.)rotary_emb\.inv_freq$", r"\.attn\.(masked_)?bias$")


def complete_weights(saved: Mapping[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a full state of `model` from the weights in a file.

    A weight that the file leaves out because it is tied is taken from the one it is tied to.

    Raises:
        CheckpointError: the file lacks weights of the model, or holds others.
    """
    own = model.state_dict()
    found = {name: saved[name] for name in own if name in saved}
    by_place = {_memory_of(own[name]): found[name] for name in found}
    for name in own:
        if name not in found and (tied := by_place.get(_memory_of(own[name]))) is not None:
            found[name] = tied
    _check_extra([name for name in saved if name not in own], model)
    _add_never_saved(own, found, model)
    if lacking := [name for name in own if name not in found]:
        raise CheckpointError(
            f"the weights lack {first_three(lacking)} of {type(model).__name__}: give the model of the run that saved "
            "them, of the same version"
        )
    return {name: found[name] for name in own}


def _check_extra(extra: list[str], model: nn.Module) -> None:
    own = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    if unknown := [name for name in extra if not any(re.search(each, name) for each in (*_COMPUTED_BUFFERS, *own))]:
        raise CheckpointError(
            f"the weights hold {first_three(unknown)}, which {type(model).__name__} does not have: give the model of "
            "the run that saved them, of the same version"
        )


def _add_never_saved(own: Mapping[str, torch.Tensor], found: dict[str, torch.Tensor], model: nn.Module) -> None:
    patterns = [
        each
        for attribute in ("_keys_to_ignore_on_save", "_keys_to_ignore_on_load_missing")
        for each in getattr(model, attribute, None) or ()
    ]
    kept = [name for name in own if name not in found and any(re.search(each, name) for each in patterns)]
    if kept:
        logger.info("%s of the model are not saved by design, and stay unchanged", first_three(kept))
    found |= {name: own[name] for name in kept}


def _memory_of(tensor: torch.Tensor) -> Hashable:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


# Moments with the shape of their parameter. The shapes of other states are not checked.
_LIKE_PARAMETER = (
    "exp_avg",
    "exp_avg_sq",
    "max_exp_avg_sq",
    "momentum_buffer",
    "square_avg",
    "grad_avg",
    "acc_delta",
    "sum",
)

# Options that later versions of torch's optimizers added: a state without them is complete.
_LATER_OPTIONS = {"foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"}

# The same for schedules, with values that torch sets at every step, and with whether to print, which torch before 2.7
# still has.
_LATER_ENTRIES = {
    "verbose",
    "_is_initial",
    "_get_lr_called_within_step",
    "_step_count",
    "_last_lr",
    "default_min_lr",
    "mode_worse",
}


def fit(part: str, state: Any, target: Any) -> Any:
    """Return the state of a part in the form that `target` takes.

    Tied weights that the file leaves out are added to a model's state. `target` stays unchanged.

    Raises:
        CheckpointError: it is the state of another model, optimizer or schedule; the message says what differs.
    """
    if part == "model" and isinstance(target, nn.Module):
        return complete_weights(state, target)
    try:
        if part == "optimizer" and isinstance(groups := getattr(target, "param_groups", None), list):
            _check_optimizer(state, target, groups)
        if part == "scheduler":
            _check_schedule(state, target)
    except (AttributeError, KeyError, TypeError) as error:
        raise CheckpointError(f"the state of the part {part!r} is not made as torch makes one: {error!r}") from error
    return state


def _check_optimizer(state: Mapping[str, Any], target: Any, groups: list[dict[str, Any]]) -> None:
    saved = state.get("param_groups")
    if not isinstance(saved, list) or not all(isinstance(group, dict) and "params" in group for group in saved):
        raise CheckpointError("the optimizer's state has no param_groups; it is not one of a torch.optim.Optimizer")
    sizes, own = ([len(group["params"]) for group in each] for each in (saved, groups))
    if sizes != own:
        raise CheckpointError(
            f"the optimizer was saved with groups of {_listed(sizes)} parameters, this run's are of {_listed(own)}: "
            "train the same parameters of the same model as the run that saved it (requires_grad, parameter_rules, "
            "get_decay_parameter_names)"
        )
    _check_options(saved, target, groups)
    numbers = [number for group in saved for number in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in state.get("state", {}).get(number, {}).items():
            expected = _shape_of(name, tuple(parameter.shape))
            if isinstance(value, torch.Tensor) and expected is not None and tuple(value.shape) != expected:
                raise CheckpointError(
                    f"the optimizer's {name} of parameter {number} has the shape {tuple(value.shape)}, and a parameter "
                    f"of shape {tuple(parameter.shape)} needs {expected}: the parameters are not those of the run that "
                    "saved it, or not in its order"
                )


def _check_options(saved: list[dict[str, Any]], target: Any, groups: list[dict[str, Any]]) -> None:
    if not type(target).__module__.startswith("torch.optim"):  # other optimizers may convert the state
        return
    for given, wanted in zip(saved, groups, strict=True):
        needed = set(target.defaults) & set(wanted) - _LATER_OPTIONS
        if lacking := sorted(needed - set(given)):
            raise CheckpointError(
                f"the optimizer was saved with the options {', '.join(sorted(set(given) - {'params'}))}, and "
                f"{type(target).__name__} also has {', '.join(lacking)}: set optim to that of the run that saved it"
            )


def _shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    if name in _LIKE_PARAMETER:
        return shape
    if len(shape) >= 2 and name in ("exp_avg_sq_row", "exp_avg_sq_col"):
        return shape[:-1] if name == "exp_avg_sq_row" else (*shape[:-2], shape[-1])
    return None


def _check_schedule(state: Mapping[str, Any], target: Any) -> None:
    if not isinstance(target, torch.optim.lr_scheduler.LRScheduler):
        return
    own = target.state_dict()
    if lacking := sorted(set(own) - set(state) - _LATER_ENTRIES):
        raise CheckpointError(
            f"the schedule was saved with {', '.join(sorted(state))}, and this run's {type(target).__name__} also has "
            f"{', '.join(lacking)}: set lr_scheduler_type to that of the run that saved it"
        )
    for name in ("base_lrs", "min_lrs", "lr_lambdas"):
        if name in own and len(own[name]) != len(state[name]):
            raise CheckpointError(
                f"the schedule was saved for {len(state[name])} parameter groups ({name}), and this run has "
                f"{len(own[name])}: train the same parameters as the run that saved it"
            )


def _listed(sizes: list[int]) -> str:
    return " and ".join(map(str, sizes)) or "no"
