"""Convert a value from a call, a file or a command line to the type of an annotation, or refuse it.

One rule holds for text from every source: it is converted to the type. Where a type leaves a choice (`bool | str`),
JSON of one of its members (`true`, `null`, `[..]`, `{..}`, a number) becomes that member.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from tr_args.constraints import Constraint
from tr_args.errors import RefusedError, did_you_mean, show
from tr_args.metadata import SEQUENCES
from tr_args.schema import FieldSpec, schema
from tr_log.bounded_text import ContentError, load_json, number

TRUE_WORDS = frozenset({"true", "yes", "on", "y", "t", "1"})
FALSE_WORDS = frozenset({"false", "no", "off", "n", "f", "0"})
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)


def convert(value: Any, hint: Any) -> Any:
    """Return `value` as the type `hint`.

    Types this module does not know accept every value that is not text. They are called with text.

    Raises:
        RefusedError: the value does not fit, or would lose information; says what is needed.
    """
    origin = get_origin(hint)
    if origin is Annotated:
        return _annotated(value, hint)
    if hint is Any or isinstance(hint, TypeVar):
        return value
    if origin in (Union, types.UnionType):
        return _union(value, get_args(hint))
    if origin is Literal:
        return _choice(value, get_args(hint))
    kind = origin or hint
    if kind in SEQUENCES:
        return _sequence(value, kind, get_args(hint))
    if kind in MAPPINGS:
        return _mapping(value, get_args(hint))
    return _single(value, kind)


def convert_field(spec: FieldSpec, value: Any) -> Any:
    """Return `value` as the type of a dataclass's field; a field's own default is always accepted.

    Raises:
        RefusedError: it does not fit.
    """
    try:
        converted = convert(value, spec.hint)
        choices = spec.metadata.get("choices")
        if choices is None or (converted is None and value is None):
            return converted
        if isinstance(converted, (list, tuple, set, frozenset)):
            return type(converted)(_choice(item, choices) for item in converted)
        return _choice(converted, choices)
    except RefusedError:
        if value is spec.default:
            return value
        raise


def _single(value: Any, kind: Any) -> Any:
    if kind in _SCALARS:
        if getattr(value, "shape", None) == () and hasattr(value, "item"):
            value = value.item()  # a number of numpy or torch. Sync: if it is on a device.
        return _SCALARS[kind](value)
    if isinstance(kind, type):
        if issubclass(kind, Enum):
            return _enum(value, kind)
        if dataclasses.is_dataclass(kind):
            return value if isinstance(value, kind) else _dataclass(value, kind)
        if isinstance(value, str) and not issubclass(kind, str):
            return _dtype(value, kind) if is_dtype(kind) else _from_text(value, kind)
    return value


def _annotated(value: Any, hint: Any) -> Any:
    constraints = [extra for extra in get_args(hint)[1:] if isinstance(extra, Constraint)]
    for constraint in constraints:
        value = constraint.before(value)
    value = convert(value, get_args(hint)[0])
    for constraint in constraints:
        value = value if value is None else constraint.after(value)
    return value


def _union(value: Any, members: tuple[Any, ...]) -> Any:
    if isinstance(value, str) and str in members:
        return _text_or_json(value, members)
    if value is None and type(None) in members:
        return None
    if isinstance(value, str) and type(None) in members and value.strip().lower() in ("null", "none"):
        return None
    for member in members:
        if type(value) is (get_origin(member) or member):
            return convert(value, member)
    refusals: list[str] = []
    for member in members:
        if member is not type(None):
            try:
                return convert(value, member)
            except RefusedError as refusal:
                refusals.append(str(refusal).removeprefix("needs "))
    raise RefusedError("needs " + " or ".join(dict.fromkeys(refusals)))


def _text_or_json(text: str, members: tuple[Any, ...]) -> Any:
    """Keep text, unless it is JSON of another member of the union."""
    stripped = text.strip()
    try:
        parsed = load_json(stripped.lower() if stripped.lower() in ("true", "false", "null") else stripped)
    except ContentError:
        return text
    for member in members:
        kind = get_origin(member) or member
        if kind is not str and type(parsed) is kind:
            return convert(parsed, member)
    return text


def _sequence(value: Any, kind: Any, arguments: tuple[Any, ...]) -> Any:
    item = next((argument for argument in arguments if argument is not Ellipsis), Any)
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            value = _json(value, list, "a list")
        else:
            value = [value] if item in (str, Any) else value.replace(",", " ").split()
    elif item in (int, float) and type(value) in (int, float):
        value = [value]  # as its text is
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise RefusedError("needs a list")
    build = kind if kind in (tuple, set, frozenset) else list
    if kind is tuple and arguments and Ellipsis not in arguments:
        if len(value) != len(arguments):
            raise RefusedError(f"needs {len(arguments)} values, not {len(value)}")
        return tuple(_item(element, hint) for element, hint in zip(value, arguments, strict=True))
    return build(_item(element, item) for element in value)


def _item(element: Any, hint: Any) -> Any:
    try:
        return convert(element, hint)
    except RefusedError as refusal:
        raise RefusedError(f"at {show(element)}: {refusal}") from None


def _mapping(value: Any, arguments: tuple[Any, ...]) -> dict[Any, Any]:
    if isinstance(value, str):
        value = _json(value, dict, "a mapping, as JSON where it is text")
    if not isinstance(value, Mapping):
        raise RefusedError("needs a mapping, as JSON where it is text")
    if not arguments:
        return dict(value)
    return {convert(key, arguments[0]): _item(element, arguments[1]) for key, element in value.items()}


def _json(text: str, kind: type, needed: str) -> Any:
    try:
        parsed = load_json(text)
    except ContentError as error:
        breaks_off = error.__cause__ if isinstance(error.__cause__, json.JSONDecodeError) else None
        where = f"breaks off at character {breaks_off.pos + 1}: {breaks_off.msg}" if breaks_off else str(error)
        raise RefusedError(f"needs {needed}; as JSON it {where}") from None
    if not isinstance(parsed, kind):
        raise RefusedError(f"needs {needed}")
    return parsed


def _dataclass(value: Any, kind: type) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # the class of another library
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    given = _mapping(value, ())
    fields = schema(kind)
    values: dict[str, Any] = {}
    for name, element in given.items():
        if name not in fields:
            raise RefusedError(f"has the unknown key {name}{did_you_mean(str(name), fields)}")
        try:
            values[name] = convert_field(fields[name], element)
        except RefusedError as refusal:
            raise RefusedError(f"at {name}={show(element)}: {refusal}") from None
    try:
        return kind(**values)
    except TypeError as error:
        raise RefusedError(f"needs all values of {kind.__name__}: {error}") from None


def _enum(value: Any, kind: type[Enum]) -> Enum:
    if isinstance(value, kind):
        return value
    if value is False:
        # YAML 1.1 reads a plain `no` as false.
        value = "no"
    for member in kind:
        spellings = (str(member.value).lower(), member.name.lower())
        if value == member.value or (isinstance(value, str) and value.lower() in spellings):
            return member
    raise _not_among(value, [member.value for member in kind])


def _choice(value: Any, choices: Collection[Any]) -> Any:
    if isinstance(value, Enum):
        value = value.value
    for choice in choices:
        if value == choice and type(value) is type(choice):
            return choice
    for choice in choices:
        # Text of a number or a boolean, and the `no` that YAML 1.1 reads as false.
        if str(value).lower() == str(choice).lower() or (value is False and choice == "no"):
            return choice
    raise _not_among(value, list(choices))


def _not_among(value: Any, choices: list[Any]) -> RefusedError:
    words = [str(choice) for choice in choices]
    return RefusedError(f"needs one of {', '.join(words)}{did_you_mean(str(value).lower(), words)}")


def is_dtype(kind: type) -> bool:
    """Return whether `kind` is torch's type of types, without importing torch."""
    return kind.__module__ == "torch" and kind.__name__ == "dtype"


def _dtype(text: str, kind: type) -> Any:
    """Return the dtype that `bfloat16` or `torch.bfloat16` names."""
    found = getattr(sys.modules[kind.__module__], text.strip().removeprefix("torch."), None)
    if not isinstance(found, kind):
        raise RefusedError("needs the name of a dtype of torch, such as bfloat16")
    return found


def _from_text(text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except (TypeError, ValueError) as error:
        raise RefusedError(f"needs a {getattr(kind, '__name__', kind)}: {error}") from None


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in TRUE_WORDS | FALSE_WORDS:
        return value.strip().lower() in TRUE_WORDS
    raise RefusedError("needs true or false")


def _whole(value: Any) -> int:
    if isinstance(value, bool):
        raise RefusedError("needs a whole number")
    try:
        if isinstance(value, str):
            text = value.strip()
            found = int(text) if text.lstrip("+-").isdecimal() else _integral(float(text))
        else:
            found = operator.index(value) if hasattr(value, "__index__") else _integral(float(value))
    except RefusedError:
        raise
    except (TypeError, ValueError, OverflowError):
        raise RefusedError("needs a whole number") from None
    if not -(1 << 63) <= found < 1 << 64:  # what a tensor, a seed or a file can hold
        raise RefusedError("needs a whole number of at most 64 bits")
    return found


def _integral(value: float) -> int:
    if not value.is_integer():
        raise RefusedError("needs a whole number")
    return int(value)


def _number(value: Any) -> float:
    if not isinstance(value, bool) and (isinstance(value, str) or hasattr(value, "__float__")):
        try:
            found = number(value) if isinstance(value, str) else float(value)
        except ContentError as error:
            raise RefusedError(f"needs a number; it {error}") from None
        except (TypeError, ValueError, OverflowError):
            raise RefusedError("needs a number") from None
        if found == found:
            return found
    raise RefusedError("needs a number")


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    raise RefusedError("needs text")


def _path(value: Any) -> Path:
    if isinstance(value, (str, os.PathLike)):
        try:
            return Path(os.fspath(value)).expanduser()
        except (RuntimeError, TypeError) as error:  # `~nobody`; a path of bytes
            raise RefusedError(f"needs a path: {error}") from None
    raise RefusedError("needs a path")


def _none(value: Any) -> None:
    if value is not None and str(value).lower() not in ("null", "none"):
        raise RefusedError("needs null")


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    bool: _boolean,
    int: _whole,
    float: _number,
    str: _text,
    Path: _path,
    type(None): _none,
}
