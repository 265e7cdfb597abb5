"""Show fields as actions of argparse, to programs that read the actions of a parser or change their defaults.

Libraries do so with a parser of theirs, to fill in the values of a configuration file; shells, to complete flags.
Command lines are not parsed by these actions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from enum import Enum
from functools import partial
from typing import Any, Literal, get_args, get_origin

from tr_args.conversion import convert
from tr_args.errors import NOTHING
from tr_args.flags import FlagTable, Option, Shape, members


class FieldActions:
    """The fields of dataclasses as actions.

    Attributes:
        actions: the actions, in the order of the fields; `--no_NAME` follows a switch that is on by default.
    """

    def __init__(self, table: FlagTable) -> None:
        """Describe the fields of a table."""
        # A field may have the name that another one's --no_NAME would have.
        self._made_by = argparse.ArgumentParser(add_help=False, conflict_handler="resolve")
        self.actions: list[argparse.Action] = []
        self._before: dict[str, tuple[argparse.Action, Any]] = {}
        for name, option in table.options.items():
            if name == option.spec.name:
                self._describe(option)

    def changed(self) -> dict[str, Any]:
        """Return the defaults that were changed since, by field, as `set_defaults` does."""
        return {name: action.default for name, (action, given) in self._before.items() if action.default is not given}

    def _describe(self, option: Option) -> None:
        spec, name = option.spec, option.spec.name
        aliases = spec.metadata.get("aliases", ())
        flags = [*_spellings(name), *([aliases] if isinstance(aliases, str) else aliases)]
        optional = spec.required and option.shape is not Shape.SWITCH
        settings = {"required": True} if optional else {"default": False if spec.required else spec.make_default()}
        flags = [flag for flag in flags if flag.startswith("-")]
        action = self._made_by.add_argument(*flags, dest=name, **settings, **_values(option))
        action.help = spec.metadata.get("help")  # afterwards: argparse wants each % in it doubled
        self.actions.append(action)
        self._before[name] = (action, action.default)
        if option.is_switch and spec.default is True:
            off = _spellings(f"no_{name}", always=True)
            negated = self._made_by.add_argument(*off, action="store_false", default=False, dest=name)
            negated.help = action.help
            self.actions.append(negated)


def _spellings(name: str, *, always: bool = False) -> list[str]:
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"])) if always or "_" in name else [f"--{name}"]


def _values(option: Option) -> dict[str, Any]:
    """Return the settings of an action that say which values it takes."""
    settings: dict[str, Any] = {"type": _type(option.hint)}
    if option.shape is Shape.MANY:
        (sequence,) = [member for member in members(option.hint) if member is not type(None)][:1]
        items = [item for item in get_args(sequence) if item is not Ellipsis]
        settings = {"type": _type(items[0]) if items else str, "nargs": "+"}
    elif option.bare is not NOTHING and option.spec.default is not None:
        settings |= {"nargs": "?", "const": option.bare}
    choices = _choices(option)
    return settings if choices is None else {**settings, "choices": choices}


def _choices(option: Option) -> Collection[Any] | None:
    kinds = [member for member in members(option.hint) if member is not type(None)]
    if len(kinds) != 1:
        return option.spec.metadata.get("choices")
    if get_origin(kinds[0]) is Literal:
        return get_args(kinds[0])
    if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return [member.value for member in kinds[0]]
    return option.spec.metadata.get("choices")


def _type(hint: Any) -> Callable[[str], Any]:
    kinds = [member for member in members(hint) if member is not type(None)]
    return kinds[0] if len(kinds) == 1 and kinds[0] in (int, float, str) else partial(_converted, hint)


def _converted(hint: Any, text: str) -> Any:
    value = convert(text, hint)
    return value.value if isinstance(value, Enum) else value
