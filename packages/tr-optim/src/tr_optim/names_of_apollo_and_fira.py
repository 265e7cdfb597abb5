"""Build APOLLO and Fira by the names that training arguments have for them.

Each function is what an entry point in the group `tr.optimizers` names. The options in `optim_args` are those that
transformers has for `apollo_adamw` (rank, proj, scale_type, update_proj_gap, scale, proj_type), and some more.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tr_optim.apollo import APOLLOAdamW
from tr_optim.fira import FiraAdamW
from tr_optim.names_for_trainer import Groups, _targets, divide_groups
from tr_optim.options import Converter, flag, number, optional_number, read_options, whole_number

_BOTH: dict[str, Converter] = {
    "rank": whole_number,
    "update_proj_gap": whole_number,
    "scale": number,
    "proj_type": str,
    "norm_growth": optional_number,
    "rotate_moments": flag,
    "stagger": flag,
    "seed": whole_number,
    "stochastic_rounding": flag,
    "compat": str,
}
_APOLLO: dict[str, Converter] = {"proj": str, "scale_type": str}
_FIRA: dict[str, Converter] = {"method": str}
_MINI = {"rank": 1, "scale_type": "tensor", "scale": 128.0}


def apollo_adamw(groups: Groups, args: Any, model: nn.Module) -> Optimizer:
    """Build `APOLLOAdamW` that takes gradients from `.grad` when it steps."""
    return _build(APOLLOAdamW, "apollo_adamw", _APOLLO, groups, args, model)


def apollo_adamw_layerwise(groups: Groups, args: Any, model: nn.Module) -> Optimizer:
    """Build `APOLLOAdamW` that applies each gradient, and frees it, in the backward pass."""
    return _build(APOLLOAdamW, "apollo_adamw_layerwise", _APOLLO, groups, args, model)


def apollo_mini(groups: Groups, args: Any, model: nn.Module) -> Optimizer:
    """Build `APOLLOAdamW` with one direction and one step size for each matrix."""
    return _build(APOLLOAdamW, "apollo_mini", _APOLLO, groups, args, model)


def apollo_mini_layerwise(groups: Groups, args: Any, model: nn.Module) -> Optimizer:
    """Build what `apollo_mini` does, applying each gradient, and freeing it, in the backward pass."""
    return _build(APOLLOAdamW, "apollo_mini_layerwise", _APOLLO, groups, args, model)


def fira_adamw(groups: Groups, args: Any, model: nn.Module) -> Optimizer:
    """Build `FiraAdamW` that takes gradients from `.grad` when it steps."""
    return _build(FiraAdamW, "fira_adamw", _FIRA, groups, args, model)


def fira_adamw_layerwise(groups: Groups, args: Any, model: nn.Module) -> Optimizer:
    """Build `FiraAdamW` that applies each gradient, and frees it, in the backward pass."""
    return _build(FiraAdamW, "fira_adamw_layerwise", _FIRA, groups, args, model)


for _factory in (
    apollo_adamw,
    apollo_adamw_layerwise,
    apollo_mini,
    apollo_mini_layerwise,
    fira_adamw,
    fira_adamw_layerwise,
):
    vars(_factory).update(needs_model=True, takes_target_modules=True)


def _build(
    kind: type[APOLLOAdamW] | type[FiraAdamW],
    name: str,
    further: Mapping[str, Converter],
    *for_groups: Any,
) -> Optimizer:
    groups, args, model = for_groups
    defaults = _MINI if name.startswith("apollo_mini") else {"rank": 128}
    options = {**defaults, "seed": args.seed, **read_options(args.optim_args, {**_BOTH, **further}, name)}
    if name.endswith("_layerwise"):
        options["mode"] = "immediate"
        _refuse_scaling(name, args)
        _tell_of_clipping(name, args, options)
    betas = (args.adam_beta1, args.adam_beta2)
    divided = divide_groups(groups, _targets(name, args, model))
    return kind(divided, args.learning_rate, betas, args.adam_epsilon, **options)


def _refuse_scaling(name: str, args: Any) -> None:
    if args.fp16:
        raise ValueError(
            f"fp16=True cannot be used with optim={name!r}, which applies gradients in the backward pass, before an "
            f"overflow of the scaled loss is known; use bf16=True, or optim={name.removesuffix('_layerwise')!r}"
        )


def _tell_of_clipping(name: str, args: Any, options: Mapping[str, Any]) -> None:
    if args.max_grad_norm:
        limit = options.get("norm_growth", 1.01)
        held = "" if limit is None else f"; max_grad_norm=0 saves it, and norm_growth={limit:g} limits updates anyway"
        logging.getLogger(__name__).info(
            "%s clips to max_grad_norm=%g by a second backward pass of each step's last micro-batch%s",
            name,
            args.max_grad_norm,
            held,
        )
