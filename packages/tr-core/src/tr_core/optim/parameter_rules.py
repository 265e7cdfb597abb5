"""Set a learning rate, a weight decay or optimizer options for the parameters that rules name.

A rule is a mapping. `TrainingArguments.parameter_rules` holds a list of rules:

    {"params": "encoder", "lr_scale": 0.1}
    {"params": ["classifier.weight", "pooler"], "learning_rate": 1e-3, "weight_decay": 0.0, "betas": [0.9, 0.95]}

`params` is one pattern or several. A pattern matches a parameter if the name contains it literally, or if the whole
name matches it as a regular expression. The first rule that matches a parameter applies. The arguments apply to
parameters without a rule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from tr_args.errors import did_you_mean
from tr_args.types.optimizer_options import RULE_KEYS
from tr_core.signatures import parameters_of

Groups = list[dict[str, Any]]

RULE = "rule"
"""The key under which a parameter group holds the name of its rule."""


@dataclass(frozen=True)
class Rule:
    """Options for some parameters.

    Attributes:
        name: name of its learning rate in the log.
        patterns: patterns of the names of its parameters.
        weight_decay: weight decay of all its parameters, biases and norms included; None for that of the arguments,
            which excludes biases and norms.
    """

    number: int
    name: str
    patterns: tuple[str, ...]
    learning_rate: float | None = None
    weight_decay: float | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"rule {self.number} of parameter_rules (params={' , '.join(self.patterns)!r})"


def read_rules(given: Sequence[Mapping[str, Any]] | None, learning_rate: float) -> list[Rule]:
    """Return the rules in the arguments."""
    rules: list[Rule] = []
    for number, values in enumerate(given or (), start=1):
        patterns = (values["params"],) if isinstance(values["params"], str) else tuple(values["params"])
        rate = values.get("learning_rate")
        if "lr_scale" in values:
            rate = (learning_rate if rate is None else rate) * values["lr_scale"]
        taken = {rule.name for rule in rules} | {other.get("name") for other in given or ()}
        name = values.get("name") or _short_name(patterns[0])
        if "name" not in values and (not name or name in taken):
            name = f"rule_{number}"
        options = {key: value for key, value in values.items() if key not in RULE_KEYS}
        rules.append(Rule(number, name, patterns, rate, values.get("weight_decay"), options))
    return rules


def assign(model: nn.Module, rules: Iterable[Rule], names: Mapping[str, bool] | None = None) -> dict[str, Rule]:
    """Return the rule of each trainable parameter that has one, by the parameter's name.

    `names` are those of a whole model of which `model` is a part, and whether each is trained.

    Raises:
        ValueError: a pattern matches nothing, or a rule has no parameter left; the message says why.
    """
    names = names or {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    rule_of: dict[str, Rule] = {}
    for rule in rules:
        matched: set[str] = set()
        for pattern in rule.patterns:
            found = {name for name in names if _matches(pattern, name)}
            if not found:
                raise ValueError(f"{rule}: {pattern!r} matches no parameter{_nearest(pattern, model)}")
            matched |= found
        trainable = [name for name in names if name in matched and names[name]]
        mine = [name for name in trainable if name not in rule_of]
        if not mine:
            reason = "parameters that earlier rules take; put it before them" if trainable else "frozen parameters"
            raise ValueError(f"{rule} matches only {reason}; it would have no effect, remove it")
        rule_of.update(dict.fromkeys(mine, rule))
    return rule_of


def groups_of(
    rule: Rule,
    decayed: list[nn.Parameter],
    others: list[nn.Parameter],
    weight_decay: float,
    exist: Sequence[bool],
) -> Groups:
    """Return the parameter groups of a rule; `exist` says which of those with decay and without the whole model has."""
    own = {**rule.options, RULE: rule.name}
    if rule.learning_rate is not None:
        own["lr"] = rule.learning_rate
    if rule.weight_decay is not None:
        return [{"params": [*decayed, *others], "weight_decay": rule.weight_decay, **own}]
    pairs = zip((decayed, others), (weight_decay, 0.0), exist, strict=True)
    return [{"params": members, "weight_decay": decay, **own} for members, decay, is_there in pairs if is_there]


def check_applied(optimizer: torch.optim.Optimizer, rules: Sequence[Rule]) -> None:
    """Raise unless the optimizer has the groups of every rule."""
    found = {group.get(RULE) for group in optimizer.param_groups}
    for rule in rules:
        if rule.name not in found:
            raise ValueError(
                f"{rule} has no effect: {type(optimizer).__name__} was built without its parameter groups; leave "
                "parameter_rules out, or have the Trainer build the optimizer"
            )


def resolve_options(optimizer: torch.optim.Optimizer, rules: Sequence[Rule]) -> None:
    """Check the options in an optimizer's groups against its parameters, and convert them to their types."""
    check_applied(optimizer, rules)
    for rule in rules:
        groups = [group for group in optimizer.param_groups if group.get(RULE) == rule.name]
        resolved = {key: _resolve_option(optimizer, rule, key, value) for key, value in rule.options.items()}
        _try_out(optimizer, rule, resolved)
        for group in groups:
            group.update(resolved)


def check_groups_on_load(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer refuse a saved state with groups of other rules.

    torch matches states to parameters by their order alone: under other rules a parameter would get the moments of
    another one.
    """
    optimizer.register_load_state_dict_pre_hook(_check_state)


def learning_rates(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Return the current learning rate of each rule, by its name in the log."""
    return {f"learning_rate/{group[RULE]}": group["lr"] for group in optimizer.param_groups if RULE in group}


def _matches(pattern: str, name: str) -> bool:
    if pattern in name:
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False


def _short_name(pattern: str) -> str:
    r"""Return a pattern without characters that trackers refuse in a name: `encoder\..*` becomes `encoder`."""
    return re.sub(r"[^\w.-]", "", pattern).strip(".")


def _nearest(pattern: str, model: nn.Module) -> str:
    try:
        re.compile(pattern)
        hint = ""
    except re.error as error:
        hint = f" and is not a regular expression ({error})"
    names = [name for name, _ in model.named_parameters()]
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in names and _matches(pattern, name):
            return f"{hint}: {name} is the same tensor as {first[id(parameter)]}; give that name"
    plain = re.sub(r"[^\w.]", "", pattern).strip(".")
    modules = [name for name, _ in model.named_modules() if name]
    near = get_close_matches(plain, [*names, *modules], n=3, cutoff=0.5)
    if near:
        return f"{hint}; near it are {', '.join(near)}"
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"{hint}; there are {shown}"


def _resolve_option(optimizer: torch.optim.Optimizer, rule: Rule, key: str, value: Any) -> Any:
    kind = type(optimizer).__name__
    if key == "lr":
        raise ValueError(f"{rule} sets lr; write learning_rate, or lr_scale for a share of the common one")
    if key not in optimizer.defaults:
        known = sorted({*RULE_KEYS, *optimizer.defaults} - {"lr"})
        raise ValueError(
            f"{rule} sets {key}, which {kind} does not take{did_you_mean(key, known)}; a rule has {', '.join(known)}"
        )
    default = optimizer.defaults[key]
    try:
        if isinstance(default, tuple):
            return tuple(_number(item) for item in value)
        if isinstance(default, bool) or default is None:
            return value
        return _number(value) if isinstance(default, int | float) else value
    except (TypeError, ValueError):
        raise ValueError(f"{rule}: {key}={value!r} is not what {kind} takes; its default is {default!r}") from None


def _number(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return value if isinstance(value, int | float) else float(value)


def _try_out(optimizer: torch.optim.Optimizer, rule: Rule, options: dict[str, Any]) -> None:
    """Check the values with the optimizer's own constructor, as defaults: it does not check values in groups."""
    kind = type(optimizer)
    taken = parameters_of(kind.__init__)
    usual = {key: value for key, value in optimizer.defaults.items() if key in taken}
    if not set(options) <= set(usual):
        return
    try:
        kind([nn.Parameter(torch.zeros(1))], **usual)
    except Exception:  # an optimizer that needs more than its defaults cannot be tried
        return
    try:
        kind([nn.Parameter(torch.zeros(1))], **{**usual, **options})
    except Exception as error:
        raise ValueError(f"{rule}: {kind.__name__} does not take {options}: {error}") from error


def _check_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    own = [(group.get(RULE), len(group["params"])) for group in optimizer.param_groups]
    saved = [(group.get(RULE), len(group["params"])) for group in state_dict["param_groups"]]
    if own != saved:
        raise ValueError(
            f"the saved optimizer state is of the parameter groups {_described(saved)}, and parameter_rules and the "
            f"model now make {_described(own)}; resume with the rules and the trainable parameters that it was saved "
            "with, or begin a new run from the model alone"
        )


def _described(groups: list[tuple[str | None, int]]) -> str:
    return ", ".join(f"{name or 'default'} ({count})" for name, count in groups)
