"""Know the command-line flags of a list of dataclasses."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tr_args.aliases import aliases
from tr_args.conversion import MAPPINGS, SEQUENCES
from tr_args.errors import NOTHING
from tr_args.schema import FieldSpec, schema
from tr_args.suggestion import did_you_mean


class Shape(Enum):
    """How many words of a command line a flag takes: one, one or none, or any number."""

    ONE = "one"
    SWITCH = "switch"
    MANY = "many"


@dataclass(frozen=True)
class Option:
    """A name under which a field can be given.

    Attributes:
        name: the name: the field's, or a former one.
        cls: the dataclass.
        spec: the field.
        hint: type of what is given under this name.
    """

    name: str
    cls: type
    spec: FieldSpec
    hint: Any

    @property
    def kinds(self) -> set[Any]:
        """The types a value may have, without their parameters."""
        return {get_origin(member) or member for member in members(self.hint)}

    @property
    def is_switch(self) -> bool:
        """Whether true and false are values, so that there is a `--no_NAME`."""
        return bool in self.kinds

    @property
    def bare(self) -> Any:
        """What the flag alone stands for; `NOTHING` if it needs a value."""
        constraint = next((item for item in self.spec.constraints if item.bare is not NOTHING), None)
        if constraint is not None:
            return constraint.bare
        return True if self.is_switch else NOTHING

    @property
    def separator(self) -> str | None:
        """What joins several words into one text; None if they stay a list."""
        return next((item.separator for item in self.spec.constraints if item.separator is not None), None)

    @property
    def shape(self) -> Shape:
        """How many words it takes."""
        kinds = self.kinds - {type(None)}
        if kinds & set(SEQUENCES):
            return Shape.MANY
        return Shape.SWITCH if kinds == {bool} else Shape.ONE

    @property
    def metavar(self) -> str | None:
        """What stands for the value in a help page; None for a switch."""
        if self.shape is Shape.SWITCH:
            return None
        words = [word for member in members(self.hint) for word in _metavars(member)]
        return "|".join(dict.fromkeys(words)) + (" ..." if self.shape is Shape.MANY else "")


class FlagTable:
    """All names of a list of dataclasses, and what they stand for.

    Attributes:
        classes: the dataclasses, in order.
        options: what each name stands for: fields, former names and `aliases` metadata, without leading `--`.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        """Collect the names.

        Raises:
            ValueError: two dataclasses have a field of the same name, or an alias is taken.
        """
        self.classes = tuple(classes)
        self.options: dict[str, Option] = {}
        for cls in self.classes:
            for name, spec in schema(cls).items():
                self._add(name, Option(name, cls, spec, spec.hint))
        for cls in self.classes:
            for spec in schema(cls).values():
                given = spec.metadata.get("aliases", ())
                for flag in [given] if isinstance(given, str) else given:
                    self._add(
                        flag.removeprefix("--").replace("-", "_") if flag[:2] == "--" else flag,
                        self.options[spec.name],
                    )
            for name, alias in aliases(cls).items():
                if name not in self.options:
                    spec = schema(cls)[alias.target]
                    self.options[name] = Option(name, cls, spec, alias.type_for(cls))

    def _add(self, name: str, option: Option) -> None:
        taken = self.options.get(name)
        if taken is not None:
            raise ValueError(
                f"the name {name} is in {taken.cls.__name__} and in {option.cls.__name__}; rename one of them"
            )
        self.options[name] = option

    def named(self, name: str) -> Option | None:
        """Return what a name in a file stands for; `-` and `_` are the same."""
        return self.options.get(name) or self.options.get(name.replace("-", "_"))

    def flag(self, flag: str) -> tuple[Option, bool] | None:
        """Return what a flag such as `--learning-rate` or `-l` stands for, and whether it is a `no_` form."""
        if not flag.startswith("--"):
            option = self.options.get(flag)
            return (option, False) if option and flag.startswith("-") else None
        name = flag[2:].replace("-", "_")
        if name in self.options:
            return self.options[name], False
        option = self.options.get(name.removeprefix("no_"))
        return (option, True) if option is not None and option.is_switch and name.startswith("no_") else None

    def unknown(self, name: str) -> str:
        """Return the message for a name or flag that stands for nothing."""
        dashes = "--" if name.startswith("--") else ""
        plain = name.removeprefix("--").replace("-", "_")
        for cls in self.classes:
            retired = getattr(cls, "_retired", {})
            if plain in retired:
                return f"argument {name} no longer exists; {retired[plain]}"
        fields = [name for name, option in self.options.items() if name == option.spec.name]
        also = [*self.options, *(f"no_{name}" for name in fields if self.options[name].is_switch)]
        hint = did_you_mean(plain, fields, also=also, prefix=dashes)
        if "-" in name.removeprefix("--") and "_" not in name:
            hint = hint.replace("_", "-")
        shown = name if name.isprintable() and " " not in name else repr(name)  # or what differs would not be seen
        return f"unknown argument {shown}{hint}"


def members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type, without constraints."""
    if get_origin(hint) is Annotated:
        return members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return tuple(part for member in get_args(hint) for part in members(member))
    return (hint,)


def _metavars(member: Any) -> list[str]:
    kind = get_origin(member) or member
    if kind is Literal:
        return [str(choice) for choice in get_args(member)]
    if kind in SEQUENCES:
        items = [argument for argument in get_args(member) if argument is not Ellipsis]
        return [word for item in items[:1] for word in _metavars(item)] or ["TEXT"]
    if kind in MAPPINGS:
        return ["JSON"]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(choice.value) for choice in kind]
    if dataclasses.is_dataclass(kind):
        return ["JSON"]
    names = {int: "INT", float: "NUMBER", str: "TEXT", bool: "BOOL", type(None): ""}
    name = names.get(kind) if kind in names else getattr(kind, "metavar", "VALUE")
    return [name] if name else []
