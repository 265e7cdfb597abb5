"""Report all problems with a set of arguments at once, and suggest the right name for a misspelt one."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tr_log.formatting import printable
from tr_log.masking import MASK, is_secret, mask_secrets

# Shorter names are part of too many others to be a hint.
LEAST_PART = 5
# Longer names are not typos, and comparing letters takes time in the product of the lengths.
LONGEST = 200
MOST_GUESSED = 50  # unknown names for which a similar one is searched: a millisecond each


def closest(name: str, known: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """Return the name in `known` that `name` most resembles, or None if none comes near.

    Args:
        name: the name as written.
        known: names it could mean.
        cutoff: least similarity, from 0 (anything) to 1 (equal).
    """
    if len(name) > LONGEST:
        return None
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, also: Iterable[str] = (), prefix: str = "") -> str:
    """Return `; did you mean NAME?` with the most similar names, or an empty string.

    Args:
        name: the name as written.
        known: names it could mean; up to three that have all its words are suggested, or the nearest one.
        also: further names, suggested only if one of them is the nearest.
        prefix: put before the names.
    """
    known = list(known)
    words = set(name.split("_"))
    containing = [other for other in known if len(name) >= LEAST_PART and words < set(other.split("_"))]
    match = closest(name, [*known, *also])
    names = containing if 1 <= len(containing) <= 3 else [match] if match else []
    return f"; did you mean {' or '.join(prefix + other for other in names)}?" if names else ""


class _Nothing(Enum):
    NOTHING = "nothing"


NOTHING: Any = _Nothing.NOTHING
"""Marks a missing value where None is a valid value."""


class _Shortener(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(mask_secrets(x), level)  # before it is cut: half a token is not recognised as one


_shortener = _Shortener()
_shortener.maxstring = _shortener.maxother = 100
_shortener.maxlist = _shortener.maxdict = 10


_MOST_SHOWN = 100  # problems
_LARGEST_SHOWN_BITS = 512
_LONGEST_WORDS = 200  # characters that a message quotes from a file or a library
_LONGEST_MESSAGE = 2_000


class RefusedError(ValueError):
    """A value does not fit; the text says what is needed instead and starts with a verb."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        field: name of the argument as the user spelled it; empty if none is involved (an unreadable file).
        value: what was given; `NOTHING` where the problem is not about a value.
        message: what is needed, or what to change.
        origin: where the value came from: `default`, `call`, `assignment`, `file NAME`, `environment VAR`,
            `command line`.
        others: name, value and origin of the further arguments that are part of the problem.
        is_unknown: whether no argument has the name.
    """

    field: str
    value: Any
    message: str
    origin: str = "call"
    others: tuple[tuple[str, Any, str], ...] = ()
    is_unknown: bool = False

    def __str__(self) -> str:
        return printable(mask_secrets(self._text()), lines=True)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self}>"  # not the value itself, which may hold a secret

    def _text(self) -> str:
        if self.value is NOTHING:
            message = cut(self.message, _LONGEST_MESSAGE)
            return f"{self.origin}: {message}" if self.origin.startswith(("file", "env")) else message
        parts = ((self.field, self.value, self.origin), *self.others)
        shown = " and ".join(
            f"{cut(name)} = {show(MASK if is_secret(name, value) else value)} ({origin})"
            for name, value, origin in parts
        )
        return f"{shown}: {cut(self.message, _LONGEST_MESSAGE)}"


class ArgumentsError(ValueError):
    """Arguments cannot be used as they are. It lists every problem found, not only the first.

    Attributes:
        problems: the problems, in the order found.
    """

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = [f"  - {problem}" for problem in self.problems[:_MOST_SHOWN]]
        if len(self.problems) > _MOST_SHOWN:
            lines.append(f"  - and {len(self.problems) - _MOST_SHOWN:,} more")
        return "\n".join([f"{len(self.problems)} problems with the arguments:", *lines])


def show(value: object) -> str:
    """Return a short text of `value` for a message."""
    if isinstance(value, Enum):
        return repr(value.value)
    if isinstance(value, int) and value.bit_length() > _LARGEST_SHOWN_BITS:
        return f"a whole number of {value.bit_length():,} bits"
    try:
        return _shortener.repr(value)
    except ValueError:  # it holds a whole number that Python refuses to convert to text
        return f"a {type(value).__name__} with a number of too many digits"


def cut(text: str, most: int = _LONGEST_WORDS) -> str:
    """Return a text, or its beginning and its length if it is too long for a message."""
    text = mask_secrets(text)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
