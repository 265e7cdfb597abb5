"""Build low-rank optimizers by their names in training arguments.

An entry point in the group `tr.optimizers` names each function. It takes parameter groups, the training
arguments and the model. For APOLLO and Fira, `optim_args` takes the options that transformers has for `apollo_adamw`:
rank, proj, scale_type, update_proj_gap, scale and proj_type. It takes some more too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn
from torch.optim import Optimizer

from tr_optim.apollo import APOLLOAdamW
from tr_optim.engine.settings import GROUP_OPTIONS, GaLoreOptions, ProjectionOptions
from tr_optim.fira import FiraAdamW
from tr_optim.galore import GaLoreAdafactor, GaLoreAdamW, GaLoreAdamW8bit
from tr_optim.options import (
    ADAFACTOR_OPTIONS,
    Converter,
    adam_arguments,
    converters,
    number,
    optional_number,
    read_options,
    whole_number,
    word,
)
from tr_optim.targets import Targets, find_targets

# Options of the layer-wise forms alone.
_IN_BACKWARD = ("mode", "reduction", "refresh_from", "exchange_dtype")
_GALORE = converters(GaLoreOptions)
_APOLLO_AND_FIRA = converters(ProjectionOptions, without=("mode",)) | {"scale": number, "norm_growth": optional_number}

Groups = list[dict[str, Any]]
Factory = TypeVar("Factory", bound=Callable[..., Optimizer])


def projects_modules(factory: Factory) -> Factory:
    """Mark a factory that needs the model, and takes `optim_target_modules`."""
    vars(factory).update(needs_model=True, takes_target_modules=True)
    return factory


@dataclass(frozen=True)
class Form:
    """One of the two forms of an optimizer: gradients stay until the step, or are freed in the backward pass.

    Attributes:
        plain: the name of the first form.
        frees_gradients: whether it is the second, the layer-wise one.
        defaults: options that a run has without `optim_args`.
    """

    plain: str
    frees_gradients: bool
    defaults: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name in training arguments."""
        return f"{self.plain}_layerwise" if self.frees_gradients else self.plain


def _galore_adamw(kind: type[GaLoreAdamW], form: Form, groups: Groups, args: Any, model: nn.Module) -> Optimizer:
    options = _galore_options(form, args, {"min_8bit_size": whole_number} if kind is GaLoreAdamW8bit else {})
    divided = divide_groups(groups, resolve_targets(form.name, args, model))
    return kind(divided, **adam_arguments(args), **options)


def _galore_adafactor(form: Form, groups: Groups, args: Any, model: nn.Module) -> Optimizer:
    options = {"scale_parameter": False, **_galore_options(form, args, ADAFACTOR_OPTIONS)}
    divided = divide_groups(groups, resolve_targets(form.name, args, model))
    return GaLoreAdafactor(divided, args.learning_rate, **options, relative_step=False)


def _galore_options(form: Form, args: Any, further: Mapping[str, Converter]) -> dict[str, Any]:
    """Return the options in `optim_args`, with the defaults of a run."""
    takes = {option: _GALORE[option] for option in _GALORE if form.frees_gradients or option not in _IN_BACKWARD}
    given = read_options(args.optim_args, {**takes, **further}, form.name)
    options = {**form.defaults, "seed": args.seed, **given}
    if form.frees_gradients:
        options.setdefault("mode", "deferred")
        if options["mode"] == "step":
            raise ValueError(f"optim_args: mode='step' of {form.name} is {form.plain}; use that name")
        if options["mode"] == "immediate" and args.max_grad_norm:
            raise ValueError(
                f"max_grad_norm={args.max_grad_norm:g} cannot be held with optim_args='mode=immediate' of {form.name}, "
                "which updates before the norm is known; use mode=deferred, or max_grad_norm=0"
            )
    return options


def resolve_targets(name: str, args: Any, model: nn.Module) -> Targets:
    """Return the matrices that `optim_target_modules` names.

    Raises:
        ValueError: it names none.
    """
    if args.optim_target_modules is None:
        raise ValueError(
            f"optim={name!r} projects the gradients of the modules that optim_target_modules names, and it is None; "
            "give names such as ['attn', 'mlp'], regular expressions, or 'all-linear'"
        )
    targets = find_targets(model, args.optim_target_modules)
    logging.getLogger(__name__).info("%s projects %s", name, targets.describe())
    return targets


def divide_groups(groups: Groups, targets: Targets) -> Groups:
    """Divide each group into the parameters that are projected and the others, without empty ones beside them.

    Args:
        groups: parameter groups; what they hold beside their parameters stays.
        targets: what is projected.

    Raises:
        ValueError: a group sets options of the projection and has nothing to project.
    """
    divided: Groups = []
    for group in groups:
        members = [p for p in group["params"] if p in targets]
        others = [p for p in group["params"] if p not in targets]
        alike = [other for other in groups if other.get("rule") == group.get("rule")]
        own = [key for key in GROUP_OPTIONS if key in group]
        if own and not any(p in targets for other in alike for p in other["params"]):
            raise ValueError(
                f"rule {group.get('rule')!r} of parameter_rules sets {', '.join(own)}, but none of its parameters is "
                "projected; name their modules in optim_target_modules"
            )
        if members:
            divided.append({**group, "params": members, "projects": True})
        if others or not members:
            divided.append({**group, "params": others, "projects": False})
    return divided


_APOLLO: dict[str, Converter] = {"proj": word, "scale_type": word}
_FIRA: dict[str, Converter] = {"method": word}
_MINI: dict[str, Any] = {"rank": 1, "scale_type": "tensor", "scale": 128.0}


def _apollo_or_fira(
    kind: type[APOLLOAdamW] | type[FiraAdamW],
    takes: Mapping[str, Converter],
    form: Form,
    groups: Groups,
    args: Any,
    model: nn.Module,
) -> Optimizer:
    given = read_options(args.optim_args, {**_APOLLO_AND_FIRA, **takes}, form.name)
    options = {**form.defaults, "seed": args.seed, **given}
    if form.frees_gradients:
        options["mode"] = "immediate"
        _refuse_scaling(form, args)
        _log_clipping(form, args, options)
    divided = divide_groups(groups, resolve_targets(form.name, args, model))
    return kind(divided, **adam_arguments(args), **options)


def _refuse_scaling(form: Form, args: Any) -> None:
    if args.fp16:
        raise ValueError(
            f"fp16=True cannot be used with optim={form.name!r}, which applies gradients in the backward pass, before "
            f"an overflow of the scaled loss is known; use bf16=True, or optim={form.plain!r}"
        )


def _log_clipping(form: Form, args: Any, options: Mapping[str, Any]) -> None:
    if args.max_grad_norm:
        limit = options.get("norm_growth", 1.01)
        held = "" if limit is None else f"; max_grad_norm=0 saves it, and norm_growth={limit:g} limits updates anyway"
        logging.getLogger(__name__).info(
            "%s clips to max_grad_norm=%g by a second backward pass of each step's last micro-batch%s",
            form.name,
            args.max_grad_norm,
            held,
        )


def _forms(plain: str, build: Callable[..., Optimizer], *kind: Any, **defaults: Any) -> list[Callable[..., Optimizer]]:
    """Return the functions of an optimizer's name in training arguments, and of its layer-wise form's.

    Args:
        plain: the name.
        build: builds the optimizer from `kind`, the form, groups, training arguments and the model.
        kind: what to build.
        defaults: options of this name, beside a rank of 128.
    """
    options = {"rank": 128, **defaults}
    return [projects_modules(partial(build, *kind, Form(plain, frees, options))) for frees in (False, True)]


galore_adamw, galore_adamw_layerwise = _forms("galore_adamw", _galore_adamw, GaLoreAdamW)
galore_adamw_8bit, galore_adamw_8bit_layerwise = _forms("galore_adamw_8bit", _galore_adamw, GaLoreAdamW8bit)
galore_adafactor, galore_adafactor_layerwise = _forms("galore_adafactor", _galore_adafactor)
apollo_adamw, apollo_adamw_layerwise = _forms("apollo_adamw", _apollo_or_fira, APOLLOAdamW, _APOLLO)
apollo_mini, apollo_mini_layerwise = _forms("apollo_mini", _apollo_or_fira, APOLLOAdamW, _APOLLO, **_MINI)
fira_adamw, fira_adamw_layerwise = _forms("fira_adamw", _apollo_or_fira, FiraAdamW, _FIRA)
