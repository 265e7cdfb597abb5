"""Settle given values for a dataclass: former names, unknown names, types, and what is missing."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tr_args.aliases import Alias, aliases
from tr_args.conversion import convert, convert_field
from tr_args.errors import NOTHING, Problem, RefusedError, show
from tr_args.schema import schema
from tr_args.suggestion import MOST_GUESSED, did_you_mean


@dataclass(frozen=True)
class Given:
    """A value as it was given.

    Attributes:
        value: the value.
        origin: where it came from.
        name: the name it was given under, where that is not the field's.
    """

    value: Any
    origin: str = "call"
    name: str = ""


class Settled(NamedTuple):
    """Converted values and their origins, by field; and whether every required field has one."""

    values: dict[str, Any]
    origins: dict[str, str]
    complete: bool


def settle(
    cls: type, given: Mapping[str, Given], problems: list[Problem], *, positional: tuple[Any, ...] = ()
) -> Settled:
    """Convert what is given for the dataclass `cls`; what cannot be used goes to `problems` instead."""
    given = {**_by_position(cls, positional, given, problems), **given}
    known = without_aliases(cls, given, problems)
    values: dict[str, Any] = {}
    fields = schema(cls)
    parameters = _parameters(cls)
    for name, item in known.items():
        if name not in fields:
            if name in parameters:  # an InitVar
                values[name] = item.value
            else:
                text = unknown(cls, name) if len(problems) < MOST_GUESSED else f"unknown argument {name}"
                problems.append(Problem(name, NOTHING, text, item.origin))
            continue
        try:
            values[name] = convert_field(fields[name], item.value)
        except RefusedError as refusal:
            shown = "***" if fields[name].secret else item.value
            problems.append(Problem(item.name or name, shown, str(refusal), item.origin))
    missing = [name for name, spec in fields.items() if spec.required and name not in known]
    problems += [Problem(name, NOTHING, f"{name} is missing; {cls.__name__} needs it") for name in missing]
    complete = all(name in values for name, spec in fields.items() if spec.required)
    return Settled(values, {name: known[name].origin for name in values}, complete)


def unknown(cls: type, name: str) -> str:
    """Return the message for a name that is no argument of `cls`."""
    retired = getattr(cls, "_retired", {})
    if name in retired:
        return f"argument {name} no longer exists; {retired[name]}"
    return f"unknown argument {name}{did_you_mean(name, schema(cls), also=aliases(cls))}"


def generated_init(cls: type) -> bool:
    """Return whether the constructor of `cls` takes its fields by name, as one that `dataclass` writes."""
    return _parameters(cls) >= set(schema(cls)) and not _is_variadic(cls)


def _rename(cls: type, name: str, alias: Alias, item: Given) -> Given:
    """Return what is given under a former name as a value of the field.

    Raises:
        RefusedError: the value does not fit the former argument.
    """
    alias.notice()
    return Given(alias.write(convert(item.value, alias.type_for(cls))), item.origin, item.name or name)


def without_aliases(cls: type, given: Mapping[str, Given], problems: list[Problem]) -> dict[str, Given]:
    """Replace former names by the fields they stand for; two names with different values are a problem."""
    former = aliases(cls)
    known = {name: item for name, item in given.items() if name not in former}
    for name in (name for name in given if name in former):
        alias, item = former[name], given[name]
        try:
            renamed = _rename(cls, name, alias, item)
        except RefusedError as refusal:
            problems.append(Problem(name, item.value, str(refusal), item.origin))
            continue
        other = known.get(alias.target)
        if other is None:
            known[alias.target] = renamed
        elif not _agree(cls, alias, item, other):
            message = f"are two names of one argument with different values; keep {alias.target}"
            problems.append(
                Problem(alias.target, other.value, message, other.origin, ((name, item.value, item.origin),))
            )
    return known


def _agree(cls: type, alias: Alias, item: Given, other: Given) -> bool:
    try:
        value = convert(item.value, alias.type_for(cls))
        target = convert_field(schema(cls)[alias.target], other.value)
    except RefusedError:
        return True  # reported where the field itself is converted
    return alias.read(target) == value or alias.write(value) == target


def _by_position(
    cls: type, positional: tuple[Any, ...], given: Mapping[str, Given], problems: list[Problem]
) -> dict[str, Given]:
    if not positional:
        return {}
    names = [
        name
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ][1:]
    if len(positional) > len(names):
        example = f"NAME={show(positional[len(names)])}"
        counts = f"{len(names)} positional argument(s), got {len(positional)}"
        message = f"takes {counts}; name the others: {example}"
        problems.append(Problem("", NOTHING, f"{cls.__name__} {message}"))
    placed = dict(zip(names, positional, strict=False))
    for name in placed.keys() & given.keys():
        problems.append(Problem(name, NOTHING, f"{name} is given twice, by position and by name; keep one"))
    return {name: Given(value) for name, value in placed.items()}


def _parameters(cls: type) -> set[str]:
    code = getattr(cls.__init__, "__code__", None)
    if code is None:
        return set()
    return set(code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount])


def _is_variadic(cls: type) -> bool:
    variadic = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    return bool(cls.__init__.__code__.co_flags & variadic)
