"""Say everything that is wrong with a set of arguments, at once."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any


class _Nothing(Enum):
    NOTHING = "nothing"


NOTHING: Any = _Nothing.NOTHING
"""Stands for 'there is no value', where None is a value like others."""

_shortener = reprlib.Repr()
_shortener.maxstring = _shortener.maxother = 100
_shortener.maxlist = _shortener.maxdict = 10


class RefusedError(ValueError):
    """A value cannot be taken; the text says what is needed instead and starts with a verb."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        field: name of the argument as the user spelled it; empty where it concerns none (an unreadable file).
        value: what was given; `NOTHING` where the problem is not about a value.
        message: what is needed, or what to change.
        origin: where the value came from: `default`, `call`, `assignment`, `file NAME`, `environment VAR`,
            `command line`.
        others: name, value and origin of the further arguments that are part of the problem.
    """

    field: str
    value: Any
    message: str
    origin: str = "call"
    others: tuple[tuple[str, Any, str], ...] = ()

    def __str__(self) -> str:
        if self.value is NOTHING:
            return f"{self.origin}: {self.message}" if self.origin.startswith(("file", "env")) else self.message
        parts = ((self.field, self.value, self.origin), *self.others)
        return " and ".join(f"{name} = {show(value)} ({origin})" for name, value, origin in parts) + f": {self.message}"


class ArgumentsError(ValueError):
    """Arguments cannot be used as they are; lists every problem found, not only the first.

    Attributes:
        problems: what is wrong, in the order found.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = "\n".join(f"  - {problem}" for problem in self.problems)
        return f"{len(self.problems)} problems with the arguments:\n{lines}"


def show(value: object) -> str:
    """Return a short text of `value` for a message."""
    if isinstance(value, Enum):
        return repr(value.value)
    return _shortener.repr(value)
