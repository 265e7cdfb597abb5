"""Read an optimizer's options from the text of a configuration, and refuse unknown ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Container, Mapping
from typing import Any, get_type_hints

from tr_log.bounded_text import ContentError, parse_options

Converter = Callable[[Any], Any]


def adam_arguments(args: Any) -> dict[str, Any]:
    """Return the training arguments of AdamW by the names of optimizers' constructors."""
    return {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}


def read_options(given: str | Mapping[str, Any] | None, takes: Mapping[str, Converter], owner: str) -> dict[str, Any]:
    """Return options by name, converted to the types that their optimizer takes.

    Args:
        given: a mapping, text as `tr_log.bounded_text.parse_options` reads it, or None.
        takes: for each option the function that converts its value, and raises ValueError or TypeError for a bad one.
        owner: whose options these are, for messages.

    Raises:
        ValueError: the text cannot be read, an option is not known, or a value is not of its type.
    """
    options: dict[str, Any] = {}
    for name, value in _by_name(given).items():
        if name not in takes:
            close = difflib.get_close_matches(name, takes, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ValueError(f"optim_args: {owner} does not take {name!r}; it takes {', '.join(sorted(takes))}{hint}")
        try:
            options[name] = takes[name](value)
        except (TypeError, ValueError) as error:
            raise ValueError(f"optim_args: {name}={value!r} of {owner} {error}") from None
    return options


def number(value: Any) -> float:
    """Convert to a float.

    Raises:
        ValueError: it is not a number.
    """
    if not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    raise ValueError("needs a number")


def whole_number(value: Any) -> int:
    """Convert to an int.

    Raises:
        ValueError: it is not a whole number.
    """
    found = number(value)
    if not found.is_integer():
        raise ValueError("needs a whole number")
    return int(found)


def optional_number(value: Any) -> float | None:
    """Convert to a float, or None from None or the word.

    Raises:
        ValueError: it is neither.
    """
    if value is None or str(value).lower() in ("none", "null"):
        return None
    return number(value)


def number_pair(value: Any) -> tuple[float, float]:
    """Convert a sequence of two, or text such as `(1e-30, 1e-3)`, to two floats.

    Raises:
        ValueError: it is not two numbers.
    """
    parts = re.split(r"[\s,;]+", value.strip("()[] ")) if isinstance(value, str) else value
    try:
        first, second = parts
    except (TypeError, ValueError):
        raise ValueError("needs two numbers, such as (1e-30, 1e-3)") from None
    return number(first), number(second)


def flag(value: Any) -> bool:
    """Convert true or false, as a word or a value, to a bool.

    Raises:
        ValueError: it is neither.
    """
    words = {"true": True, "false": False}
    if str(value).lower() not in words:
        raise ValueError("needs true or false")
    return words[str(value).lower()]


def word(value: Any) -> str:
    """Return text; `none` where it was read as nothing.

    Raises:
        ValueError: it is not text.
    """
    if value is None or isinstance(value, str):
        return "none" if value is None else value
    raise ValueError("needs a word")


def optional_word(value: Any) -> str | None:
    """Return text, or None from None or the word.

    Raises:
        ValueError: it is neither.
    """
    return None if word(value).lower() in ("none", "null") else word(value)


_OF_TYPES: dict[Any, Converter] = {
    int: whole_number,
    int | None: whole_number,
    float: number,
    float | None: optional_number,
    bool: flag,
    str: word,
    str | None: optional_word,
}
ADALOMO_OPTIONS: dict[str, Converter] = {"eps": number_pair, "clip_threshold": number, "decay_rate": number}
ADAFACTOR_OPTIONS: dict[str, Converter] = {**ADALOMO_OPTIONS, "beta1": optional_number, "scale_parameter": flag}


def converters(options: type, without: Container[str] = ()) -> dict[str, Converter]:
    """Return the functions that convert the options of a `TypedDict`, by name.

    Args:
        options: a `TypedDict` of numbers, flags and words.
        without: names to leave out.
    """
    return {name: _OF_TYPES[kind] for name, kind in get_type_hints(options).items() if name not in without}


def _by_name(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    try:
        return parse_options(given)
    except ContentError as error:
        raise ValueError(f"optim_args={given!r} {error}") from None
