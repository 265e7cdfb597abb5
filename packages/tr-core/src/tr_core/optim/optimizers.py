"""Build the optimizer that the arguments name, with groups for parameters with and without weight decay."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _foreach_utils

from tr_args import parse_optim_args
from tr_args.fields.training import OptimizerFields
from tr_core import plugins
from tr_core.optim.parameter_rules import Groups, Rule, assign, check_groups_on_load, groups_of, resolve_options
from tr_core.start import without_collection

# Weight decay excludes biases and the scales of norms: whole LayerNorm modules, and other norms by name.
_NO_DECAY_NAME = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)", re.IGNORECASE)


def decay_parameter_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters with weight decay, by the reference Trainer's rule."""
    inside_norms = {
        f"{module_name}.{name}" if module_name else name
        for module_name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters()
    }
    return [
        name for name, _ in model.named_parameters() if name not in inside_norms and not _NO_DECAY_NAME.search(name)
    ]


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    decayed: Collection[str] | None = None,
    rules: Sequence[Rule] = (),
    names: Mapping[str, bool] | None = None,
) -> Groups:
    """Divide the trainable parameters into groups, by weight decay and by their rules.

    Frozen parameters are excluded. The first two groups, of parameters without a rule, always exist, though one may be
    empty. So saved optimizer states keep their shape.

    Args:
        model: its parameters.
        weight_decay: of those without a rule.
        decayed: names of those that it applies to; None for those of `decay_parameter_names`.
        rules: for some of them.
        names: of the whole model's parameters, and whether each is trained, where this process has some of them alone:
            there are the groups of the whole, and some may be empty.

    Raises:
        ValueError: nothing is trainable, or a rule matches nothing.
    """
    decay_names = set(decay_parameter_names(model) if decayed is None else decayed)
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        total = sum(1 for _ in model.parameters())
        raise ValueError(
            f"none of the {total} parameters of {type(model).__name__} is trainable; set requires_grad where "
            "training is to change something"
        )
    rule_of = assign(model, rules, names)

    def members(rule: Rule | None, decays: bool) -> list[nn.Parameter]:
        return [p for n, p in trainable.items() if rule_of.get(n) is rule and (n in decay_names) == decays]

    groups: Groups = [
        {"params": members(None, True), "weight_decay": weight_decay},
        {"params": members(None, False), "weight_decay": 0.0},
    ]
    for rule in rules:
        exist = [any(rule_of[n] is rule and (n in decay_names) == decays for n in rule_of) for decays in (True, False)]
        groups += groups_of(rule, members(rule, True), members(rule, False), weight_decay, exist)
    return groups


def optimizer_factory(
    args: OptimizerFields, model: nn.Module | None = None
) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return the function that builds `args.optim` from parameter groups, and its keyword arguments.

    For an optimizer of torch the function is its class; for one of an installed package, a function of the groups. A
    package's function is called with groups and arguments, and with the model if its attribute `needs_model` is True. A
    function that uses `optim_target_modules` has a true `takes_target_modules`.

    Raises:
        tr_core.plugins.PluginError: no installed package has the name; the message says which one does.
        ValueError: `optim_args` has an argument that the optimizer does not take, or the optimizer takes no target
            modules.
    """
    name = str(args.optim)
    if name in _TORCH:
        _refuse_targets(args)
        return _where_it_is(model, *_TORCH[name](args))
    factory = plugins.load("tr.optimizers", name, built_in=_TORCH)
    if not getattr(factory, "takes_target_modules", False):
        _refuse_targets(args)
    return partial(_build, factory, args, model), {}


def build_optimizer(
    kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any], groups: Groups, rules: Sequence[Rule] = ()
) -> torch.optim.Optimizer:
    """Build an optimizer over parameter groups, and apply the options of their rules.

    `params`, `model` or `optimizer_dict` among the options replaces the groups.

    Raises:
        ValueError: a rule has an option that the optimizer does not take.
    """
    options = dict(options)
    for name in ("params", "model", "optimizer_dict"):
        groups = options.pop(name, groups)
    # The first optimizer of a process imports torch's compiler, which takes longer than anything here.
    with nullcontext() if "torch._dynamo" in sys.modules else without_collection():
        optimizer = kind(groups, **options)
    resolve_options(optimizer, rules)
    check_groups_on_load(optimizer)
    return optimizer


def describe(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer's class and its options that are set, without the learning rate."""
    passed_over = ("lr", "weight_decay", "params")
    known = {name: value for name, value in optimizer.defaults.items() if name not in passed_over}
    settings = [f"{name}={value}" for name, value in known.items() if value is not None and value is not False]
    return type(optimizer).__name__ + (f" ({', '.join(settings)})" if settings else "")


def has_fused(device: torch.device) -> bool:
    """Whether torch's fused optimizers run on a device, by torch's list; they raise only in a step."""
    return device.type in _foreach_utils._get_fused_kernels_supported_devices()


def optimizer_names() -> list[str]:
    """List every name that `optim` can have with the installed packages."""
    return sorted({*_TORCH, *plugins.available("tr.optimizers")})


def _build(
    factory: Callable[..., torch.optim.Optimizer], args: OptimizerFields, model: nn.Module | None, groups: Groups
) -> torch.optim.Optimizer:
    if not getattr(factory, "needs_model", False):
        return factory(groups, args)
    if model is None:
        raise ValueError(
            f"optim={str(args.optim)!r} looks for its parameters in the model; pass it too, as in "
            "Trainer.get_optimizer_cls_and_kwargs(args, model)"
        )
    return factory(groups, args, model)


def _refuse_targets(args: OptimizerFields) -> None:
    if getattr(args, "optim_target_modules", None) is not None:
        raise ValueError(
            f"optim_target_modules={args.optim_target_modules!r} has no effect on optim={str(args.optim)!r}, which "
            "updates all parameters alike; leave it out, or use an optimizer that projects gradients, as galore_adamw"
        )


Factory = tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]


def _where_it_is(
    model: nn.Module | None, kind: Callable[..., torch.optim.Optimizer], options: dict[str, Any]
) -> Factory:
    """Remove options that the model's device does not support."""
    place = None if model is None else next(model.parameters(), None)
    if place is not None and not has_fused(place.device):
        options = {name: value for name, value in options.items() if name != "fused"}
    return kind, options


def _adamw(args: OptimizerFields, **variant: Any) -> Factory:
    own = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return torch.optim.AdamW, {**own, **variant, **_extra(args, {"amsgrad", "maximize", "capturable"})}


def _adamw_fused(args: OptimizerFields) -> Factory:
    return _adamw(args, fused=True)


def _sgd(args: OptimizerFields) -> Factory:
    options = _extra(args, {"momentum", "dampening", "nesterov"})
    return torch.optim.SGD, {"lr": args.learning_rate, **options}


def _adagrad(args: OptimizerFields) -> Factory:
    options = _extra(args, {"lr_decay", "initial_accumulator_value", "eps"})
    return torch.optim.Adagrad, {"lr": args.learning_rate, **options}


def _rmsprop(args: OptimizerFields) -> Factory:
    options = _extra(args, {"alpha", "eps", "momentum", "centered"})
    return torch.optim.RMSprop, {"lr": args.learning_rate, **options}


_TORCH: dict[str, Callable[[Any], Factory]] = {
    "adamw_torch": _adamw,
    "adamw_torch_fused": _adamw_fused,
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rmsprop": _rmsprop,
}


def _extra(args: OptimizerFields, allowed: set[str]) -> dict[str, Any]:
    given = parse_optim_args(args.optim_args)
    if unknown := sorted(set(given) - allowed):
        raise ValueError(
            f"optim_args has {unknown}, which optim={str(args.optim)!r} does not take; it takes {sorted(allowed)}"
        )
    return given
