"""Make the fields of several dataclasses actions of argparse, and split a command line by their flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import MISSING
from enum import Enum
from functools import partial
from typing import Any, Literal, get_args, get_origin

from tr_args.aliases import aliases
from tr_args.conversion import FALSE_WORDS, MAPPINGS, TRUE_WORDS, convert
from tr_args.errors import NOTHING, Problem, RefusedError, did_you_mean
from tr_args.metadata import SEQUENCES, kinds, members, reader, refusals
from tr_args.schema import FieldSpec, schema


class Shape(Enum):
    """How many words of a command line a flag takes: one (ONE), one or none (SWITCH), or any number (MANY)."""

    ONE = "one"
    SWITCH = "switch"
    MANY = "many"


class FieldAction(argparse.Action):
    """A name under which a field can be given, as an action of argparse.

    `CommandLine` reads the words of this package's parser. argparse itself does where that is the parent of another.

    Attributes:
        dest: the name: the field's, or a former one.
        cls: the dataclass.
        spec: the field.
        hint: type of what is given under this name.
        shape: how many words it takes.
        is_switch: whether true and false are values. Only then `--no_NAME` exists.
        collects: whether a flag that is given again adds to what it was given before.
        own_default: the field's default; `default` may be changed, as `set_defaults` does.
    """

    def __init__(self, name: str, cls: type, spec: FieldSpec, hint: Any) -> None:
        """Describe the name `name` of a field of `cls`."""
        self.cls, self.spec, self.hint = cls, spec, hint
        own, found = spec.metadata, kinds(hint)
        self.is_switch = bool in found
        self.collects = own.get("action") in ("append", "extend")
        self.shape = Shape.SWITCH if found == {bool} else Shape.ONE
        if found & set(SEQUENCES) and own.get("action") != "append":
            self.shape = Shape.MANY
        has_default = not spec.required or self.shape is Shape.SWITCH
        self.own_default = None if not has_default else False if spec.required else spec.make_default()
        super().__init__(
            [flag for flag in (*_spellings(name), *_aliases(spec)) if flag.startswith("-")],
            name,
            default=self.own_default,
            required=spec.must_be_given or not has_default,
            help=own.get("help"),
            metavar=own.get("metavar"),
            choices=_choices(hint, own.get("choices")),
            **self._words(),
        )

    def _words(self) -> dict[str, Any]:
        """Return how many words argparse would read, what it would make of each, and the value of the flag alone."""
        own = self.spec.metadata
        read, nargs = reader(self.spec.declared, own), own.get("nargs")
        if kinds(self.hint) & set(SEQUENCES):
            sequence = next(member for member in members(self.hint) if member is not type(None))
            items = [item for item in get_args(sequence) if item is not Ellipsis]
            several = {} if self.shape is Shape.ONE else {"nargs": nargs or "+"}
            return {"type": read or (_type(items[0]) if items else str), **several}
        one = {"type": read or _type(self.hint)}
        takes_none = nargs == "?" or (self.bare is not NOTHING and self.spec.default is not None)
        return {**one, "nargs": "?", "const": self.bare} if takes_none else one

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Store what argparse has read."""
        if self.collects:
            several = values if isinstance(values, list) else [values]
            values = [*(getattr(namespace, self.dest, None) or ()), *several]
        setattr(namespace, self.dest, values)

    @property
    def bare(self) -> Any:
        """The value of the flag alone; `NOTHING` if it needs one."""
        constraint = next((item for item in self.spec.constraints if item.bare is not NOTHING), None)
        if constraint is not None:
            return constraint.bare
        if self.is_switch:
            return True
        nargs = self.spec.metadata.get("nargs")
        return self.spec.metadata.get("const") if nargs == "?" else [] if nargs == "*" else NOTHING

    @property
    def placeholder(self) -> str | None:
        """What stands for the value in a help page; None for a switch."""
        if self.shape is Shape.SWITCH:
            return None
        if isinstance(self.metavar, tuple):
            return " ".join(self.metavar)
        words = [self.metavar] if self.metavar else [word for one in members(self.hint) for word in _placeholders(one)]
        return "|".join(dict.fromkeys(words)) + (" ..." if self.shape is Shape.MANY else "")

    def joined(self, words: list[str]) -> Any:
        """Return one word as it is, and several as a list or, where a constraint has a separator, as text."""
        if self.collects or self.shape is not Shape.MANY:
            return words if self.collects else words[0]
        separator = next((item.separator for item in self.spec.constraints if item.separator is not None), None)
        if separator is not None:
            return separator.join(words)
        return words if len(words) > 1 else words[0]

    def read(self, value: Any) -> Any:
        """Return text, or a list of words, as the metadata's `type` reads it.

        Raises:
            RefusedError: it cannot.
        """
        read = reader(self.spec.declared, self.spec.metadata)
        if read is None or not isinstance(value, (str, list)):
            return value
        if isinstance(value, list):
            return [self.read(item) for item in value]
        try:
            return read(value)
        except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
            raise RefusedError(f"is not read by {getattr(read, '__name__', read)}: {error}") from None


class OffAction(argparse.Action):
    """The flag `--no_NAME` of a switch, as an action of argparse."""

    def __init__(self, switch: FieldAction) -> None:
        """Describe the flag that turns a switch off."""
        off = _spellings(f"no_{switch.dest}")
        super().__init__(off, switch.dest, nargs=0, const=False, default=False, help=switch.help)

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Store False."""
        setattr(namespace, self.dest, False)


def _spellings(name: str) -> list[str]:
    """Return the flags of a name, with `_` and with `-`."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def _aliases(spec: FieldSpec) -> Sequence[str]:
    given = spec.metadata.get("aliases", ())
    return [given] if isinstance(given, str) else given


def _choices(hint: Any, given: Collection[Any] | None) -> Collection[Any] | None:
    alone = [member for member in members(hint) if member is not type(None)]
    if len(alone) == 1 and get_origin(alone[0]) is Literal:
        return get_args(alone[0])
    if len(alone) == 1 and isinstance(alone[0], type) and issubclass(alone[0], Enum):
        return [member.value for member in alone[0]]
    return given


def _type(hint: Any) -> Callable[[str], Any]:
    alone = [member for member in members(hint) if member is not type(None)]
    return alone[0] if len(alone) == 1 and alone[0] in (int, float, str) else partial(_converted, hint)


def _converted(hint: Any, text: str) -> Any:
    value = convert(text, hint)
    return value.value if isinstance(value, Enum) else value


class FlagTable:
    """All names of a list of dataclasses, and what they mean.

    Attributes:
        classes: the dataclasses, in order.
        options: the option of each name: fields, former names and `aliases` metadata, without leading `--`.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        """Collect the names.

        Raises:
            ValueError: two dataclasses have a field of the same name, an alias is taken, or a field's metadata has a
                setting that a field cannot have.
        """
        self.classes = tuple(classes)
        self.options: dict[str, FieldAction] = {}
        _check_metadata(self.classes)
        for cls in self.classes:
            for name, spec in schema(cls).items():
                self._add(name, FieldAction(name, cls, spec, spec.hint))
        for cls in self.classes:
            for spec in schema(cls).values():
                for flag in _aliases(spec):
                    name = flag.removeprefix("--").replace("-", "_") if flag[:2] == "--" else flag
                    self._add(name, self.options[spec.name])
            for name, alias in aliases(cls).items():
                if name not in self.options:
                    spec = schema(cls)[alias.target]
                    self.options[name] = FieldAction(name, cls, spec, alias.type_for(cls))

    def _add(self, name: str, option: FieldAction) -> None:
        taken = self.options.get(name)
        if taken is not None:
            raise ValueError(
                f"the name {name} is in {taken.cls.__name__} and in {option.cls.__name__}; rename one of them"
            )
        self.options[name] = option

    def actions(self) -> list[argparse.Action]:
        """Return the fields as actions, in their order; `--no_NAME` follows a switch that is on by default."""
        found: list[argparse.Action] = []
        for name, option in self.options.items():
            if name != option.spec.name:
                continue
            found.append(option)
            if option.is_switch and option.spec.default is True:
                found.append(OffAction(option))
        return found

    def changed_defaults(self) -> dict[str, Any]:
        """Return the defaults that were changed since, by field."""
        fields = {name: option for name, option in self.options.items() if name == option.spec.name}
        return {name: option.default for name, option in fields.items() if option.default is not option.own_default}

    def named(self, name: str) -> FieldAction | None:
        """Return the option of a name in a file; `-` and `_` are the same."""
        return self.options.get(name) or self.options.get(name.replace("-", "_"))

    def flag(self, flag: str) -> tuple[FieldAction, bool] | None:
        """Return the option of a flag such as `--learning-rate` or `-l`, and whether it is a `no_` form."""
        if not flag.startswith("--"):
            option = self.options.get(flag)
            return (option, False) if option and flag.startswith("-") else None
        name = flag[2:].replace("-", "_")
        if name in self.options:
            return self.options[name], False
        option = self.options.get(name.removeprefix("no_"))
        return (option, True) if option is not None and option.is_switch and name.startswith("no_") else None

    def unknown(self, name: str) -> str:
        """Return the message for an unknown name or flag."""
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
        shown = name if name.isprintable() and " " not in name else repr(name)  # repr shows invisible characters
        return f"unknown argument {shown}{hint}"


def _check_metadata(classes: Iterable[type]) -> None:
    found = [
        f"{cls.__name__}.{name}: {text}"
        for cls in classes
        for name, spec in schema(cls).items()
        for text in refusals(spec.declared, MISSING if spec.required else spec.make_default(), spec.metadata)
    ]
    if found:
        raise ValueError("metadata of fields that their flags cannot have:\n  " + "\n  ".join(found))


def _placeholders(member: Any) -> list[str]:
    kind = get_origin(member) or member
    if kind is Literal:
        return [str(choice) for choice in get_args(member)]
    if kind in SEQUENCES:
        items = [argument for argument in get_args(member) if argument is not Ellipsis]
        return [word for item in items[:1] for word in _placeholders(item)] or ["TEXT"]
    if kind in MAPPINGS:
        return ["JSON"]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(choice.value) for choice in kind]
    if dataclasses.is_dataclass(kind):
        return ["JSON"]
    names = {int: "INT", float: "NUMBER", str: "TEXT", bool: "BOOL", type(None): ""}
    name = names.get(kind) if kind in names else getattr(kind, "metavar", "VALUE")
    return [name] if name else []


class CommandLine:
    """What words of a command line say, by a table of flags; a flag must be written in full.

    Attributes:
        origin: source of the words, for messages.
        values: the values by the name they were given under; the last one if a name is repeated.
        config_files: files named by the configuration flag, in order.
        rest: words that belong to no known flag, in order.
        problems: flags without their value and the like.
    """

    def __init__(
        self, words: Sequence[str], table: FlagTable, *, config_flag: str | None, foreign: Collection[str], origin: str
    ) -> None:
        """Read the words.

        Args:
            words: the words.
            table: the flags.
            config_flag: the flag that names a configuration file, or None.
            foreign: flags that other code reads; they end a list of values.
            origin: source of the words.
        """
        self.origin = origin
        self.values: dict[str, Any] = {}
        self.config_files: list[str] = []
        self.rest: list[str] = []
        self.problems: list[Problem] = []
        self._words, self._table, self._config_flag, self._foreign = words, table, config_flag, foreign
        position = 0
        while position < len(words):
            position = self._next(position)

    def _next(self, position: int) -> int:
        """Read the flag at `position` with its values, or leave that word, and return the next position."""
        word = self._words[position]
        if word == "--":
            self.rest += self._words[position:]
            return len(self._words)
        flag, equals, inline = word.partition("=") if word.startswith("--") else (word, "", "")
        match = self._table.flag(flag)
        if match is None and flag != self._config_flag:
            self.rest.append(word)
            return position + 1
        # Only after a flag: searching the end of a long list behind each word takes quadratic time.
        following = [inline] if equals else self._following(position + 1)
        taken = (
            self._take_config(flag, following) if match is None else self._take(*match, flag, following, bool(equals))
        )
        return position + 1 + (0 if equals else taken)

    def _take_config(self, flag: str, following: list[str]) -> int:
        if not following:
            self._refuse(flag, f"{flag} needs the path of a YAML, TOML or JSON file")
        self.config_files += following[:1]
        return len(following[:1])

    def _take(self, action: FieldAction, negated: bool, flag: str, following: list[str], is_inline: bool) -> int:
        """Record the value of a field, and return how many of the following words it took."""
        name = action.dest
        if negated:
            if is_inline:
                self._refuse(flag, f"{flag} takes no value; write --{name}={following[0]}")
            else:
                self.values[name] = False
            return 0
        if action.shape is Shape.ONE:
            following = following[:1]
        elif action.shape is Shape.SWITCH and not is_inline:
            following = following[:1] if following and following[0].lower() in TRUE_WORDS | FALSE_WORDS else []
        if following:
            value = action.joined(following)
            self.values[name] = [*self.values.get(name, ()), *value] if action.collects else value
        elif action.bare is not NOTHING:
            self.values[name] = action.bare
        else:
            self._refuse(flag, f"{flag} needs a value; one that starts with -- is written {flag}=VALUE")
        return len(following)

    def _following(self, start: int) -> list[str]:
        """Return the words from `start` up to the next flag."""
        end = start
        while end < len(self._words) and not self._is_flag(self._words[end]):
            end += 1
        return list(self._words[start:end])

    def _is_flag(self, word: str) -> bool:
        return word.startswith("--") or word in self._foreign or self._table.flag(word) is not None

    def _refuse(self, flag: str, message: str) -> None:
        self.problems.append(Problem(flag, NOTHING, message, self.origin))
