"""Divide a model's parameters into groups with their own weight decay and learning rate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

# Biases and norms' scales get no weight decay. Matched anywhere in the parameter's full name.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


def decay_parameter_names(model: nn.Module, *, norm_types: tuple[type[nn.Module], ...] = (nn.LayerNorm,)) -> list[str]:
    """Return the names of the parameters that weight decay applies to, in the order of `model.named_parameters()`.

    Left out are the parameters of `norm_types` modules, and those whose name contains `bias`, `layernorm` or `rmsnorm`,
    a segment `norm`, or a segment that ends in `_norm`. With the default this is the rule of transformers 5; a norm of
    another class is recognised by its name only, so add `nn.BatchNorm2d`, `nn.GroupNorm` or `nn.RMSNorm` where names
    do not tell.

    Args:
        model: frozen parameters count too; a tied one counts once, under its first name.
        norm_types: modules none of whose parameters decay.
    """
    inside_norms = tuple(
        f"{path}." if path else ""
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, norm_types)
    )
    return [
        name for name, _ in model.named_parameters() if not name.startswith(inside_norms) and not _NO_DECAY.search(name)
    ]


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    lr_by_pattern: Mapping[str, float] | None = None,
    norm_types: tuple[type[nn.Module], ...] = (nn.LayerNorm,),
) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer: with and without weight decay, and by learning rate.

    The first two groups are always there, though one may be empty, so that optimizer states keep their shape: with
    `weight_decay`, and without. Two more follow for each pattern, as far as they are not empty. Frozen parameters are
    left out, a tied one is listed once; within a group the order is that of `model.named_parameters()`.

    Args:
        model: the model to train.
        weight_decay: of the parameters that `decay_parameter_names` lists.
        lr_by_pattern: learning rates by regular expression, searched in the parameter's name; the first that matches
            counts. Parameters that none matches have no `lr` of their own.
        norm_types: modules none of whose parameters decay.

    Raises:
        ValueError: nothing is trainable, a pattern matches no trainable parameter, or a number is negative.
    """
    rates = dict(lr_by_pattern or {})
    _check_numbers(weight_decay, rates)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable:
        total = sum(1 for _ in model.parameters())
        raise ValueError(
            f"none of the {total} parameters of {type(model).__name__} is trainable; "
            "set requires_grad_(True) on those to train"
        )
    pattern_of = {name: _first_match(name, rates) for name in trainable}
    _check_all_match(rates, set(pattern_of.values()), list(trainable))
    decaying = set(decay_parameter_names(model, norm_types=norm_types))
    groups: list[dict[str, Any]] = []
    for pattern in (None, *rates):
        own = {} if pattern is None else {"lr": rates[pattern]}
        for decays in (True, False):
            params = [
                p for name, p in trainable.items() if pattern_of[name] == pattern and (name in decaying) == decays
            ]
            if params or pattern is None:
                groups.append({"params": params, "weight_decay": weight_decay if decays else 0.0, **own})
    return groups


def _first_match(name: str, patterns: Mapping[str, float]) -> str | None:
    return next((pattern for pattern in patterns if re.search(pattern, name)), None)


def _check_numbers(weight_decay: float, rates: Mapping[str, float]) -> None:
    if weight_decay < 0:
        raise ValueError(f"weight_decay={weight_decay:g} must not be negative: it would let weights grow")
    for pattern, rate in rates.items():
        if rate < 0:
            raise ValueError(
                f"lr_by_pattern[{pattern!r}]={rate:g} must not be negative; 0 keeps parameters as they are"
            )


def _check_all_match(rates: Mapping[str, float], used: set[str | None], names: list[str]) -> None:
    for pattern in rates:
        if pattern not in used:
            hidden = any(re.search(pattern, name) for name in names)
            reason = "only parameters that an earlier pattern takes" if hidden else "no trainable parameter"
            raise ValueError(
                f"lr_by_pattern: {pattern!r} matches {reason}; trainable are {', '.join(names[:5])}"
                + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            )
