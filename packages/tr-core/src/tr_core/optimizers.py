"""Build the optimizer that the arguments name, over groups with and without weight decay."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tr_args import parse_optim_args
from tr_core import plugins

Groups = list[dict[str, Any]]

# Biases and the scales of norms are not weights to be shrunk: whole LayerNorm modules, and by name the others.
_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that weight decay applies to, by the reference Trainer's rule."""
    inside_norms = {
        f"{module_name}.{name}" if module_name else name
        for module_name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters()
    }
    return [
        name for name, _ in model.named_parameters() if name not in inside_norms and not _NO_DECAY_NAME.search(name)
    ]


def parameter_groups(model: nn.Module, weight_decay: float, decayed: list[str] | None = None) -> Groups:
    """Divide the trainable parameters into a group with and a group without weight decay.

    Frozen parameters are left out. Both groups are always there, the second possibly empty, so that saved optimizer
    states keep their shape.

    Raises:
        ValueError: nothing is trainable.
    """
    decay_names = set(decay_parameter_names(model) if decayed is None else decayed)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        total = sum(1 for _ in model.parameters())
        raise ValueError(
            f"none of the {total} parameters of {type(model).__name__} is trainable; set requires_grad where "
            "training is to change something"
        )
    return [
        {"params": [p for name, p in trainable if name in decay_names], "weight_decay": weight_decay},
        {"params": [p for name, p in trainable if name not in decay_names], "weight_decay": 0.0},
    ]


def build_optimizer(groups: Groups, args: Any) -> torch.optim.Optimizer:
    """Build `args.optim`: a torch optimizer, or one that an installed package offers under that name.

    Raises:
        tr_core.plugins.PluginError: nothing offers the name; the message says which package would.
        ValueError: `optim_args` has what the optimizer does not take.
    """
    name = str(args.optim)
    factory = _TORCH.get(name) or plugins.load("tr.optimizers", name)
    return factory(groups, args)


def optimizer_names() -> list[str]:
    """List every name that `optim` can have with what is installed."""
    return sorted({*_TORCH, *plugins.available("tr.optimizers")})


def _adamw(groups: Groups, args: Any, **variant: Any) -> torch.optim.Optimizer:
    own = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return torch.optim.AdamW(groups, **own, **variant, **_extra(args, {"amsgrad", "maximize", "capturable"}))


def _adamw_fused(groups: Groups, args: Any) -> torch.optim.Optimizer:
    return _adamw(groups, args, fused=True)


def _sgd(groups: Groups, args: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=args.learning_rate, **_extra(args, {"momentum", "dampening", "nesterov"}))


def _adagrad(groups: Groups, args: Any) -> torch.optim.Optimizer:
    allowed = {"lr_decay", "initial_accumulator_value", "eps"}
    return torch.optim.Adagrad(groups, lr=args.learning_rate, **_extra(args, allowed))


def _rmsprop(groups: Groups, args: Any) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, lr=args.learning_rate, **_extra(args, {"alpha", "eps", "momentum", "centered"}))


_TORCH: dict[str, Callable[[Groups, Any], torch.optim.Optimizer]] = {
    "adamw_torch": _adamw,
    "adamw_torch_fused": _adamw_fused,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
}


def _extra(args: Any, allowed: set[str]) -> dict[str, Any]:
    given = parse_optim_args(args.optim_args)
    if unknown := sorted(set(given) - allowed):
        raise ValueError(
            f"optim_args has {unknown}, which optim={str(args.optim)!r} does not take; it takes {sorted(allowed)}"
        )
    return given
