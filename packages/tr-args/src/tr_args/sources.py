"""Gather values for several dataclasses from files, the environment and command lines; later ones win."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tr_args.bounded_text import ContentError, read_text
from tr_args.construction import Given, without_aliases
from tr_args.errors import NOTHING, ArgumentsError, Problem
from tr_args.flags import FlagTable
from tr_args.suggestion import MOST_GUESSED, closest

MOST_BYTES = 1 << 20  # of a file of arguments


class Sources:
    """Values by dataclass and field. What is added later wins.

    Attributes:
        given: for each dataclass, its fields' values.
        problems: what was wrong with the sources.
    """

    def __init__(self, table: FlagTable) -> None:
        self._table = table
        self.given: dict[type, dict[str, Given]] = {cls: {} for cls in table.classes}
        self.problems: list[Problem] = []

    def add(self, values: Mapping[str, Any], origin: str, *, allow_extra: bool = False) -> None:
        """Add values by name: those of fields, former names, aliases.

        A name of one of the dataclasses (`TrainingArguments` or `training_arguments`) may hold a mapping of
        its fields.

        Args:
            values: the values.
            origin: where they come from.
            allow_extra: leave out unknown names instead of noting a problem.
        """
        given: dict[str, Given] = {}
        for name, value in values.items():
            if self._table.named(name) is not None:
                given[name] = Given(value, origin)
            elif isinstance(value, Mapping) and name in {*self._sections(), *map(_snake, self._sections())}:
                self.add(value, origin, allow_extra=allow_extra)
            elif not allow_extra:
                self.problems.append(Problem(name, NOTHING, self._unknown(name, value), origin))
        self._add_layer(given)

    def _add_layer(self, given: Mapping[str, Given]) -> None:
        """Add values of known names that are equal in rank: two different ones for a field are a problem."""
        layer: dict[type, dict[str, Given]] = {cls: {} for cls in self._table.classes}
        for name, item in given.items():
            option = self._table.named(name)
            if option is None:
                continue
            # Names with `-` and aliases of a field's metadata mean the field; former names come below.
            if option.name in layer[option.cls]:
                message = f"has {option.name} twice, in two spellings; keep one"
                self.problems.append(Problem(name, NOTHING, message, item.origin))
            layer[option.cls][option.name] = item
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
        """Add environment variables called `prefix` and a name in capitals; a near miss is a problem."""
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
        return shlex.split(read_text(path, MOST_BYTES), comments=True)
    except ContentError as error:
        message = str(error)
    except ValueError as error:
        message = f"is not a list of arguments: {str(error)[:1].lower()}{str(error)[1:]}"
    raise ArgumentsError([Problem("", NOTHING, message, f"file {path}")])


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
