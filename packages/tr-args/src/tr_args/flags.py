"""List the flags of several dataclasses, split a command line by them, and show them as actions of argparse."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import MISSING, dataclass, field
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
    def is_switch(self) -> bool:
        """Whether true and false are values. Only then `--no_NAME` exists."""
        return bool in kinds(self.hint)

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
    def collects(self) -> bool:
        """Whether a flag that is given again adds to what it was given before."""
        return self.spec.metadata.get("action") in ("append", "extend")

    @property
    def separator(self) -> str | None:
        """Text that joins several words; None if they stay a list."""
        return next((item.separator for item in self.spec.constraints if item.separator is not None), None)

    @property
    def shape(self) -> Shape:
        """How many words it takes."""
        found = kinds(self.hint)
        if found & set(SEQUENCES):
            return Shape.ONE if self.spec.metadata.get("action") == "append" else Shape.MANY
        return Shape.SWITCH if found == {bool} else Shape.ONE

    @property
    def metavar(self) -> str | None:
        """The placeholder of the value in a help page; None for a switch."""
        if self.shape is Shape.SWITCH:
            return None
        metavar = self.spec.metadata.get("metavar")
        if isinstance(metavar, tuple):
            return " ".join(metavar)
        words = [metavar] if metavar else [word for member in members(self.hint) for word in _metavars(member)]
        return "|".join(dict.fromkeys(words)) + (" ..." if self.shape is Shape.MANY else "")

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
        self.options: dict[str, Option] = {}
        _check_metadata(self.classes)
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
        """Return the option of a name in a file; `-` and `_` are the same."""
        return self.options.get(name) or self.options.get(name.replace("-", "_"))

    def flag(self, flag: str) -> tuple[Option, bool] | None:
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


@dataclass
class Scan:
    """The content of a command line.

    Attributes:
        values: the values by the name they were given under; the last one if a name is repeated.
        config_files: files named by the configuration flag, in order.
        rest: words that belong to no known flag, in order.
        problems: flags without their value and the like.
    """

    values: dict[str, Any] = field(default_factory=dict)
    config_files: list[str] = field(default_factory=list)
    rest: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


class Scanner:
    """Read words by a table of flags. A flag must be written in full."""

    def __init__(self, table: FlagTable, *, config_flag: str | None, foreign: Collection[str], origin: str) -> None:
        """Prepare to scan.

        Args:
            table: the flags.
            config_flag: the flag that names a configuration file, or None.
            foreign: flags that other code reads; they end a list of values.
            origin: source of the words, for messages.
        """
        self._table = table
        self._config_flag = config_flag
        self._foreign = foreign
        self._origin = origin

    def scan(self, words: Sequence[str]) -> Scan:
        """Return the flags, values and other words in `words`."""
        result = Scan()
        position = 0
        while position < len(words):
            position = self._next(words, position, result)
        return result

    def _next(self, words: Sequence[str], position: int, result: Scan) -> int:
        """Read the flag at `position` with its values, or leave that word, and return the next position."""
        word = words[position]
        if word == "--":
            result.rest += words[position:]
            return len(words)
        flag, equals, inline = word.partition("=") if word.startswith("--") else (word, "", "")
        match = self._table.flag(flag)
        if match is None and flag != self._config_flag:
            result.rest.append(word)
            return position + 1
        # Only after a flag: searching the end of a long list behind each word takes quadratic time.
        following = [inline] if equals else self._following(words, position + 1)
        if match is None or flag == self._config_flag:
            return position + self._take_config(flag, following, result) + (0 if equals else 1)
        option, negated = match
        if equals and not negated:
            _put(option, [inline], result)
            return position + 1
        if equals:
            result.problems.append(self._problem(flag, f"{flag} takes no value; write --{option.name}={inline}"))
            return position + 1
        return position + 1 + self._take(option, flag, following, negated, result)

    def _take_config(self, flag: str, following: list[str], result: Scan) -> int:
        if not following:
            result.problems.append(self._problem(flag, f"{flag} needs the path of a YAML, TOML or JSON file"))
            return 0
        result.config_files.append(following[0])
        return 1

    def _take(self, option: Option, flag: str, following: list[str], negated: bool, result: Scan) -> int:
        """Record the value of `option`, and return how many of the following words it took."""
        if negated:
            result.values[option.name] = False
            return 0
        if option.shape is Shape.SWITCH:
            following = following[:1] if following and following[0].lower() in TRUE_WORDS | FALSE_WORDS else []
        elif option.shape is Shape.ONE:
            following = following[:1]
        if following:
            _put(option, following, result)
        elif option.bare is not NOTHING:
            result.values[option.name] = option.bare
        else:
            message = f"{flag} needs a value; one that starts with -- is written {flag}=VALUE"
            result.problems.append(self._problem(flag, message))
        return len(following)

    def _following(self, words: Sequence[str], start: int) -> list[str]:
        """Return the words from `start` up to the next flag."""
        end = start
        while end < len(words) and not self._is_flag(words[end]):
            end += 1
        return list(words[start:end])

    def _is_flag(self, word: str) -> bool:
        return word.startswith("--") or word in self._foreign or self._table.flag(word) is not None

    def _problem(self, flag: str, message: str) -> Problem:
        return Problem(flag, NOTHING, message, self._origin)


def _put(option: Option, words: list[str], result: Scan) -> None:
    if option.collects:
        result.values[option.name] = [*result.values.get(option.name, ()), *words]
    else:
        result.values[option.name] = _joined(option, words)


def _joined(option: Option, words: list[str]) -> Any:
    """Return one word as it is, and several as a list or joined to text."""
    if option.shape is Shape.MANY and option.separator is not None:
        return option.separator.join(words)
    return words if option.shape is Shape.MANY and len(words) > 1 else words[0]


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
        has_default = not spec.required or option.shape is Shape.SWITCH
        settings: dict[str, Any] = {"required": spec.must_be_given or not has_default}
        settings |= {"default": False if spec.required else spec.make_default()} if has_default else {}
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
    own = option.spec.metadata
    read = reader(option.spec.declared, own)
    settings: dict[str, Any] = {"type": read or _type(option.hint)}
    if kinds(option.hint) & set(SEQUENCES):
        (sequence,) = [member for member in members(option.hint) if member is not type(None)][:1]
        items = [item for item in get_args(sequence) if item is not Ellipsis]
        settings = {"type": read or (_type(items[0]) if items else str)}
        settings |= {} if option.shape is Shape.ONE else {"nargs": own.get("nargs", "+")}
    elif own.get("nargs") == "?" or (option.bare is not NOTHING and option.spec.default is not None):
        settings |= {"nargs": "?", "const": option.bare}
    settings |= {key: own[key] for key in ("metavar",) if key in own}
    settings |= {"action": own["action"]} if option.collects else {}
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
