"""Read mappings from YAML, TOML and JSON files, strictly, and gather values from several sources.

The sources are files, the environment and command lines; later ones win. `ConfigFile` lets a field take the path of a
file in place of a mapping.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tr_args.checked import Given, without_aliases
from tr_args.constraints import Constraint
from tr_args.errors import MOST_GUESSED, NOTHING, ArgumentsError, Problem, RefusedError, closest, cut
from tr_args.flags import FlagTable
from tr_log.bounded_text import MOST_LEVELS, ContentError, check_depth, load_json, number, read_text

# A key with more dotted parts than levels are allowed. The parser would walk through all earlier parts for each.
_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_CHAIN = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MOST_LEVELS}}}")


def read_mapping(path: str | os.PathLike[str], kind: str | None = None) -> dict[str, Any]:
    """Return the mapping in a file.

    Plain scalars of YAML follow YAML 1.2: `5e-5` is a number, `no` is text. Duplicate keys are refused in every
    format. An empty YAML or TOML file is an empty mapping.

    Args:
        path: the file; `~` is the home folder.
        kind: `yaml`, `toml` or `json`; None uses the file's ending.

    Raises:
        ArgumentsError: the file does not exist, or does not hold a mapping in its format; says where.
    """
    try:
        reader, most_bytes = _reader(Path(path), kind)
        content = reader(read_text(path, most_bytes))
        return {} if content is None else _checked_mapping(content)
    except (RefusedError, ContentError) as refusal:
        raise ArgumentsError([Problem("", NOTHING, cut(str(refusal)), f"file {path}")]) from None
    except RecursionError:
        # Deeper nesting has its own message. A caller deep in other calls has less stack left.
        message = "cannot be read from so deep within other calls"
        raise ArgumentsError([Problem("", NOTHING, message, f"file {path}")]) from None


def _reader(path: Path, kind: str | None) -> tuple[Callable[[str], Any], int]:
    ending = kind or path.suffix.lower().removeprefix(".")
    if ending not in _READERS:
        raise RefusedError(f"has the unknown ending {path.suffix!r}; needs .yaml, .yml, .toml or .json")
    return _READERS[ending]


def _checked_mapping(content: Any) -> dict[str, Any]:
    if not isinstance(content, dict):
        held = {list: "a list", str: "text", bool: "a truth value"}.get(type(content), "a number")
        raise RefusedError(f"holds {held}; needs a mapping of argument names to values")
    for key in content:
        if not isinstance(key, str):
            raise RefusedError(f"has the key {key!r}; needs names as keys")
    return content


def _read_toml(text: str) -> Any:
    import tomllib

    if match := _CHAIN.search(text):
        line = text.count("\n", 0, match.start()) + 1
        raise ContentError(f"is nested more than {MOST_LEVELS} levels deep, on line {line}")
    try:
        content = tomllib.loads(text, parse_float=number)
    except tomllib.TOMLDecodeError as error:
        raise RefusedError(f"is not valid TOML: {error}") from None
    except RecursionError:
        raise RefusedError(f"is nested more than {MOST_LEVELS} levels deep") from None
    except ValueError as error:
        if isinstance(error, ContentError):
            raise
        raise RefusedError(f"is not valid TOML: {error}") from None
    check_depth(content)
    return content


def _read_yaml(text: str) -> Any:
    # Imported here: few programs read YAML, and its import is most of this package's import time.
    from tr_args.yaml_loader import load

    return load(text)


_READERS: dict[str, tuple[Callable[[str], Any], int]] = {
    "json": (load_json, 16 << 20),
    "toml": (_read_toml, 4 << 20),
    "yaml": (_read_yaml, 1 << 20),  # half a megabyte is read in a second
    "yml": (_read_yaml, 1 << 20),
}


class ConfigFile(Constraint):
    """A mapping, JSON text of one, or the path of a JSON, YAML or TOML file that holds one.

    None means the empty mapping.
    """

    def before(self, value: Any) -> Any:
        """Return what the file holds, if `value` is a path."""
        if value is None:
            return {}
        if isinstance(value, os.PathLike):
            value = os.fspath(value)
        if isinstance(value, str) and value and not value.lstrip().startswith("{"):
            try:
                return read_mapping(value)
            except ArgumentsError as error:
                raise RefusedError(f"needs a mapping or the path of a file; {error}") from None
        return value


MOST_WORDS_BYTES = 1 << 20  # largest file of arguments


class Sources:
    """Values by dataclass and field. Values that are added later win.

    Attributes:
        given: for each dataclass, its fields' values.
        problems: the problems of the sources.
    """

    def __init__(self, table: FlagTable) -> None:
        self._table = table
        self.given: dict[type, dict[str, Given]] = {cls: {} for cls in table.classes}
        self.problems: list[Problem] = []

    def add(self, values: Mapping[str, Any], origin: str, *, allow_extra: bool = False) -> None:
        """Add values by the names of fields, former names and aliases.

        The name of a dataclass (`TrainingArguments` or `training_arguments`) may hold a mapping of its fields.

        Args:
            values: the values.
            origin: where they come from.
            allow_extra: ignore unknown names instead of recording a problem.
        """
        given: dict[str, Given] = {}
        for name, value in values.items():
            if self._table.named(name) is not None:
                given[name] = Given(value, origin)
            elif isinstance(value, Mapping) and name in {*self._sections(), *map(_snake, self._sections())}:
                self.add(value, origin, allow_extra=allow_extra)
            elif not allow_extra:
                self.problems.append(Problem(name, NOTHING, self._unknown(name, value), origin, is_unknown=True))
        self._add_layer(given)

    def _add_layer(self, given: Mapping[str, Given]) -> None:
        """Add values of one source under known names; two different values for a field are a problem."""
        layer: dict[type, dict[str, Given]] = {cls: {} for cls in self._table.classes}
        for name, item in given.items():
            option = self._table.named(name)
            if option is None:
                continue
            # Names with `-` and aliases of a field's metadata mean the field. Former names follow below.
            if option.dest in layer[option.cls]:
                message = f"has {option.dest} twice, in two spellings; keep one"
                self.problems.append(Problem(name, NOTHING, message, item.origin))
            try:
                layer[option.cls][option.dest] = replace(item, value=option.read(item.value))
            except RefusedError as refusal:
                self.problems.append(option.spec.problem(item.value, refusal, item.origin, name=name))
        for cls, known in layer.items():
            self.given[cls].update(without_aliases(cls, known, self.problems))

    def _unknown(self, name: str, value: Any) -> str:
        if len(self.problems) >= MOST_GUESSED:
            return f"unknown argument {name}"
        if isinstance(value, Mapping):
            return f"unknown section {name}; there can be {', '.join(map(_snake, self._sections()))}"
        return self._table.unknown(name)

    def _sections(self) -> list[str]:
        return [cls.__name__ for cls in self._table.classes]

    def add_environment(self, prefix: str) -> None:
        """Add environment variables called `prefix` and a name in capitals; a similar unknown name is a problem."""
        names = {f"{prefix}{name.upper()}": name for name in self._table.options if name.isidentifier()}
        given: dict[str, Given] = {}
        for variable, value in os.environ.items():
            if variable in names:
                given[names[variable]] = Given(value, f"environment {variable}")
            elif variable.startswith(prefix) and (meant := closest(variable, names, cutoff=0.85)):
                message = f"unknown variable {variable}; did you mean {meant}?"
                self.problems.append(Problem(variable, NOTHING, message, "environment"))
        self._add_layer(given)


def read_words(path: Path) -> list[str]:
    """Return the words of a file of arguments, with a shell's quotes and comments.

    Raises:
        ArgumentsError: it cannot be read, or a quote is not closed.
    """
    try:
        return shlex.split(read_text(path, MOST_WORDS_BYTES), comments=True)
    except ContentError as error:
        message = str(error)
    except ValueError as error:
        message = f"is not a list of arguments: {str(error)[:1].lower()}{str(error)[1:]}"
    raise ArgumentsError([Problem("", NOTHING, message, f"file {path}")])


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
