"""Read the options of an optimizer from `name=value` text, and rules for some of the parameters.

A rule gives the parameters that it names their own learning rate, weight decay or optimizer options.
"""

from __future__ import annotations

from collections.abc import Mapping
from json import JSONDecodeError
from typing import Any

from tr_args.constraints import Constraint, NonNegative
from tr_args.conversion import convert
from tr_args.errors import RefusedError, did_you_mean, show
from tr_log.bounded_text import MOST_LEVELS, ContentError, load_json, number

MOST_CHARACTERS = 10_000
_OPENING = {"[": "]", "(": ")", "{": "}"}
_WORDS = {"true": True, "false": False, "none": None, "null": None}


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
    if len(value) > MOST_CHARACTERS:
        raise RefusedError(f"needs at most {MOST_CHARACTERS:,} characters; it has {len(value):,}")
    if value.lstrip().startswith("{"):
        return _from_json(value)
    options: dict[str, Any] = {}
    for part in _split(value):
        name, equals, text = part.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise RefusedError(f"needs name=value parts separated by commas, not {part.strip()!r}")
        if name in options:
            raise RefusedError(f"needs each name once; {name} is there twice")
        options[name] = _literal(text.strip())
    return options


def _from_json(text: str) -> dict[str, Any]:
    try:
        return dict(load_json(text))
    except ContentError as error:
        at = (
            f"breaks off at character {error.__cause__.pos + 1}"
            if isinstance(error.__cause__, JSONDecodeError)
            else error
        )
        raise RefusedError(f"needs name=value parts or JSON; as JSON it {at}") from None


def _split(text: str) -> list[str]:
    """Split at the commas that lie outside quotes and brackets."""
    parts, start, closers, quote = [], 0, [], ""
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _OPENING:
            closers.append(_OPENING[character])
            if len(closers) > MOST_LEVELS:
                raise RefusedError(f"needs at most {MOST_LEVELS} brackets within each other")
        elif closers and character == closers[-1]:
            closers.pop()
        elif character == "," and not closers:
            parts.append(text[start:position])
            start = position + 1
    if quote or closers:
        raise RefusedError(f"needs the closing {quote or closers[-1]} of a value")
    return [part for part in (*parts, text[start:]) if part.strip()]


def _literal(text: str) -> Any:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text[:1] in ("[", "(") and text[-1:] in ("]", ")"):
        return [_literal(part.strip()) for part in _split(text[1:-1])]
    for kind in (int, number):
        try:
            return kind(text)
        except ContentError as error:
            raise RefusedError(f"needs numbers; it {error}") from None
        except ValueError:
            continue
    return text


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
