"""Read the settings of `argparse` in a field's metadata, and refuse those that a field cannot have.

`help`, `aliases`, `choices`, `metavar`, `type`, `required` and `const` act on the field's flag. `nargs`, and an
`action` that collects, also change the field's type: to a list of what its annotation says.
"""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING
from typing import Annotated, Any, Union, get_args, get_origin

from tr_args.constraints import Exactly
from tr_args.errors import did_you_mean

SEQUENCES = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)

_KNOWN = ("help", "aliases", "choices", "metavar", "type", "required", "const", "nargs", "action", "default", "dest")
_CONVERTED = (bool, int, float, str)  # `bool("false")` is true, so these are read by the annotation's rule alone


def members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type, without constraints."""
    if get_origin(hint) is Annotated:
        return members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(part for member in get_args(hint) for part in members(member))
    return (hint,)


def kinds(hint: Any) -> set[Any]:
    """Return the types that a value may have, without their parameters; None is none of them."""
    return {get_origin(member) or member for member in members(hint)} - {type(None)}


def optional(hint: Any) -> Any:
    """Return the type with None; constraints stay outside."""
    if get_origin(hint) is Annotated:
        base, *extras = get_args(hint)
        return Annotated[typing.Optional[base], *extras]  # noqa: UP045 - see below
    return typing.Optional[hint]  # noqa: UP045 - not every annotation has a `|`


def hint_of_words(hint: Any, metadata: Mapping[str, Any]) -> Any:
    """Return the type of a field by its annotation and by how many words its flag takes."""
    nargs = metadata.get("nargs")
    if nargs == "?":
        return hint if metadata.get("const") is not None else optional(hint)  # the flag alone means None
    takes_several = nargs in ("+", "*") or type(nargs) is int or metadata.get("action") == "append"
    if takes_several and not kinds(hint) & {*SEQUENCES, bool}:
        several = list[_without_none(hint)]
        hint = optional(several) if type(None) in members(hint) else several
    return Annotated[hint, Exactly(nargs)] if type(nargs) is int else hint


def reader(hint: Any, metadata: Mapping[str, Any]) -> Callable[[str], Any] | None:
    """Return what reads a word before it is converted to the annotated type; None if that type is all there is."""
    read = metadata.get("type")
    return None if read in _own_types(hint) else read


def refusals(hint: Any, default: Any, metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the metadata of a field, and what to write.

    Args:
        hint: the field's annotation.
        default: its default, `MISSING` for none.
        metadata: the metadata.
    """
    for key in metadata:
        if key not in _KNOWN:
            yield f"{key!r} is not known{did_you_mean(str(key), _KNOWN)}; known are {', '.join(_KNOWN[:-2])}"
    given = {key: metadata.get(key) for key in _KNOWN}
    if given["dest"] is not None:
        yield f"dest={given['dest']!r} is not supported: the value is the field's; leave it out"
    if "default" in metadata and given["default"] != default:
        yield f"default={given['default']!r} is not the field's; write field(default=..., metadata=...)"
    if given["required"] is False and default is MISSING and kinds(hint) != {bool}:
        yield "required=False needs a default of the field; write field(default=..., metadata=...)"
    metavar = given["metavar"]
    words = metavar if isinstance(metavar, tuple) else (metavar,)
    if metavar is not None and not all(isinstance(word, str) for word in words):
        yield f"metavar={metavar!r} needs text"
    yield from _refused_type(hint, given["type"])
    yield from _refused_nargs(hint, given["nargs"], metadata)
    yield from _refused_action(hint, default, given["action"], given["nargs"])


def _refused_type(hint: Any, read: Any) -> Iterator[str]:
    own = _own_types(hint)
    if read is None or read in own or Any in own:
        return
    if not callable(read):
        yield f"type={read!r} needs a function of a word"
    elif read in _CONVERTED:
        yield f"type={read.__name__} is not what the field is annotated with; annotate it so, and leave type out"


def _refused_nargs(hint: Any, nargs: Any, metadata: Mapping[str, Any]) -> Iterator[str]:
    is_switch, is_list = kinds(hint) == {bool}, bool(kinds(hint) & set(SEQUENCES))
    if nargs not in (None, "?", "*", "+") and not (type(nargs) is int and nargs > 0):
        yield f"nargs={nargs!r} is not supported; needs '?', '*', '+' or a number from 1"
    elif is_switch and nargs not in (None, "?"):
        yield f"nargs={nargs!r} is not supported: the flag of a bool takes one word or none; annotate list[bool]"
    elif is_list and nargs == "?":
        yield "nargs='?' is not supported: a list takes several words; needs '*', '+' or a number"
    if "const" not in metadata:
        return
    if is_switch and metadata["const"] is not True:
        yield f"const={metadata['const']!r} is not supported: the flag of a bool alone means true; leave it out"
    elif not is_switch and nargs != "?":
        yield f"const={metadata['const']!r} is the value of the flag alone; needs nargs='?'"


def _refused_action(hint: Any, default: Any, action: Any, nargs: Any) -> Iterator[str]:
    is_list = bool(kinds(hint) & set(SEQUENCES))
    if action in (None, "store"):
        return
    if action == "store_true":
        if kinds(hint) != {bool} or default is True:
            yield "action='store_true' needs a field that is bool and False by default; a bool needs no action"
    elif action not in ("append", "extend"):
        yield f"action={action!r} is not supported; needs 'store', 'store_true', 'append' or 'extend'"
    elif default is not MISSING and default:
        yield f"action={action!r} needs a field without a default, or with an empty one; not {default!r}"
    elif action == "append" and (is_list or nargs is not None):
        yield "action='append' would make lists in a list; needs 'extend' where a flag takes several words"
    elif action == "extend" and not is_list and nargs not in ("+", "*") and type(nargs) is not int:
        yield "action='extend' needs nargs, or a field that is a list; 'append' takes one word at a time"


def _own_types(hint: Any) -> set[Any]:
    """Return the types that read a word as the annotation does: its own, those of a list's items, and text."""
    items = [item for member in members(hint) if get_origin(member) in SEQUENCES for item in get_args(member)]
    return {None, str, *kinds(hint), *(kind for item in items for kind in kinds(item))}


def _without_none(hint: Any) -> Any:
    if get_origin(hint) is Annotated:
        base, *extras = get_args(hint)
        return Annotated[_without_none(base), *extras]
    kept = tuple(member for member in members(hint) if member is not type(None))
    return Union[kept] if type(None) in members(hint) else hint  # noqa: UP007 - of any number
