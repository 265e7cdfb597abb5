"""Find what differs between two states as JSON holds them, by their places."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tr_ckpt.command.table import shorten

_LONGEST = 44  # characters of a value that are shown

_MOST_BITS = 4096  # of a number that is shown in digits

_PAIRS = ("$dict", "$ordered", "$counter")

_NUMBERS = {"$float": float, "$int": lambda content: int(content, 16)}


@dataclass(frozen=True)
class _Tagged:
    """A value that JSON does not have: bytes, a dtype, a tensor by its name."""

    tag: str
    content: Any


@dataclass(frozen=True)
class ValueDifference:
    """A value that differs.

    Attributes:
        place: where it is, such as `scheduler.last_epoch`.
        text: what became of it, such as `10 -> 20`.
        size: how much it changed: of numbers the relative change, of anything else infinite.
    """

    place: str
    text: str
    size: float = float("inf")


def compare_values(first: Any, second: Any, place: str) -> Iterator[ValueDifference]:
    """Yield what differs between two values read from JSON, in the order of the first.

    What `tree.py` writes for containers and numbers that JSON does not have is taken for what it stands for.
    """
    one, other = _open(first), _open(second)
    if _kind(one) != _kind(other) or not isinstance(one, dict | list):
        if (leaves := _text(one)) != _text(other):
            yield ValueDifference(place, f"{_shown(leaves)} -> {_shown(_text(other))}", _change(one, other))
    elif isinstance(one, dict):
        yield from _compare_members(one, other, place)
    else:
        for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
            yield from compare_values(mine, theirs, f"{place}[{index}]")
        if len(one) != len(other):
            yield ValueDifference(place, f"{_items(len(one))} -> {_items(len(other))}")


def _compare_members(one: dict[str, Any], other: dict[str, Any], place: str) -> Iterator[ValueDifference]:
    for name, value in one.items():
        inside = _inside(place, name)
        if name in other:
            yield from compare_values(value, other[name], inside)
        else:
            yield ValueDifference(inside, f"only in A: {_shown(_text(_open(value)))}")
    for name, value in other.items():
        if name not in one:
            yield ValueDifference(_inside(place, name), f"only in B: {_shown(_text(_open(value)))}")


def _open(value: Any) -> Any:
    """Return a dict, a list, a number, or another value, whichever the JSON stands for."""
    if not isinstance(value, dict) or not value:
        return value
    [tag, *more] = value
    content = value[tag]
    if tag in _PAIRS and isinstance(content, list) and all(isinstance(pair, list) and pair[1:] for pair in content):
        members = {_key(pair[0]): pair[1] for pair in content}
        return members | {name.removeprefix("$"): value[name] for name in more}
    if more or not tag.startswith("$"):
        return value
    if tag == "$tuple":
        return content
    try:
        return _NUMBERS[tag](content) if tag in _NUMBERS else _Tagged(tag, content)
    except (TypeError, ValueError):  # another program's
        return value


def _key(encoded: Any) -> str:
    opened = _open(encoded)
    return opened if isinstance(opened, str) else _text(opened)


def _kind(value: Any) -> type:
    return type(value) if isinstance(value, dict | list) else object


def _text(value: Any) -> str:
    if isinstance(value, _Tagged):
        return f"{value.tag[1:]} {value.content if isinstance(value.content, str) else json.dumps(value.content)}"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return hex(value)  # in digits it takes long, and Python refuses some
    return json.dumps(value)


def _shown(text: str) -> str:
    return shorten(text, _LONGEST)


def _items(number: int) -> str:
    return f"{number} item{'s' * (number != 1)}"


def _inside(place: str, name: str) -> str:
    return f"{place}.{name}" if name.isidentifier() else f"{place}[{name}]"


def _change(one: Any, other: Any) -> float:
    if type(one) not in (int, float) or type(other) not in (int, float):
        return float("inf")
    try:
        change = abs(other - one) / max(abs(one), abs(other), 1e-300)
    except OverflowError:  # an integer beyond all floats
        return float("inf")
    return change if change == change else float("inf")
