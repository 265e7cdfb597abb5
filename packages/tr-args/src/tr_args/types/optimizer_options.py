"""Read the options of an optimizer from `name=value` text, and rules for some of the parameters.

A rule gives the parameters that it names their own learning rate, weight decay or optimizer options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tr_args.constraints import Constraint, NonNegative
from tr_args.conversion import convert
from tr_args.errors import RefusedError, did_you_mean, show
from tr_log.bounded_text import ContentError, parse_options


class OptimizerOptions(Constraint):
    """Options that `parse_optim_args` can read; they are kept as they were given."""

    def after(self, value: Any) -> Any:
        """Return `value` if it can be read."""
        parse_optim_args(value)
        return value


def parse_optim_args(value: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an optimizer's options by name.

    Text is JSON, or `name=value` parts separated by commas. A value may hold commas within quotes or
    brackets. Numbers, `true`, `false`, `none` and bracketed lists are converted; quoted text stays
    text.

    Raises:
        RefusedError: (a ValueError) the text cannot be read; says which part.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    try:
        return parse_options(value)
    except ContentError as error:
        raise RefusedError(str(error)) from None


RULE_KEYS = ("params", "name", "learning_rate", "lr_scale", "weight_decay")
"""Keys that a rule itself has; every other one is an option of the optimizer."""

_RULE_TYPES: dict[str, Any] = {
    "params": str | list[str],
    "name": str,
    "learning_rate": NonNegative,
    "lr_scale": NonNegative,
    "weight_decay": NonNegative,
}


class ParameterRules(Constraint):
    """A list of mappings, each with `params` and at least one thing that it sets."""

    def before(self, value: Any) -> Any:
        """Return a list where one rule alone was given."""
        if isinstance(value, Mapping) or (isinstance(value, str) and value.lstrip().startswith("{")):
            return [value]
        return value

    def after(self, value: Any) -> Any:
        """Return the rules with numbers and names converted."""
        rules = [_checked_rule(number, rule) for number, rule in enumerate(value, start=1)]
        names = [rule["name"] for rule in rules if "name" in rule]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RefusedError(f"needs a different name for every rule; {', '.join(twice)} is there twice")
        return rules


def _checked_rule(number: int, rule: Mapping[Any, Any]) -> dict[str, Any]:
    if not rule.get("params"):
        near = next((did_you_mean(str(key), ["params"]) for key in rule if did_you_mean(str(key), ["params"])), "")
        given = f"has {', '.join(map(str, rule))}" if rule else "is empty"
        raise RefusedError(
            f"needs params in every rule, the parameters it is for: parts of their names or regular expressions; "
            f"rule {number} {given}{near}"
        )
    if set(rule) <= {"params", "name"}:
        raise RefusedError(f"needs something that rule {number} sets, such as learning_rate or weight_decay")
    checked = {str(key): value for key, value in rule.items()}
    for key in RULE_KEYS:
        if key in checked:
            try:
                checked[key] = convert(checked[key], _RULE_TYPES[key])
            except RefusedError as refusal:
                raise RefusedError(f"at {key}={show(checked[key])} of rule {number}: {refusal}") from None
    patterns = [checked["params"]] if isinstance(checked["params"], str) else checked["params"]
    if not all(pattern.strip() for pattern in [*patterns, checked.get("name", "-")]):
        raise RefusedError(f"needs text in params and name of rule {number}: the empty one is part of every name")
    return checked
