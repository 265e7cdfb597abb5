"""Count what was tried in an attack, and what went wrong in it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# What an attack must never achieve, in the order of the table's columns.
LOST = "lost"  # a verified checkpoint or finished work is gone
EXECUTED = "executed"  # content that came from outside was run
OUTSIDE = "outside"  # something was written, removed or shown outside the folder that was given
HUNG = "hung"  # a time limit was passed, or memory grew beyond its limit
WRONG_END = "wrong end"  # an exit code, a result or an error that is not the right one; a raw error in place of words
KINDS = (LOST, EXECUTED, OUTSIDE, HUNG, WRONG_END)


@dataclass(frozen=True)
class Options:
    """What an attack is asked to do.

    Attributes:
        folder: an empty folder of its own.
        seed: of what is drawn.
        jobs: processes that may work at once.
        quick: whether a part of it is enough: seconds in place of minutes.
    """

    folder: Path
    seed: int = 1
    jobs: int = 2
    quick: bool = False


@dataclass
class Count:
    """What one group of attacks came to.

    Attributes:
        group: its name in the table.
        tried: how many attacks were made.
        ends: how often it ended in which way that is right, by a word for each, such as `refused` or `as if alone`.
        problems: what went wrong: its kind, one of `KINDS`, and a sentence with all that is needed to repeat it.
    """

    group: str
    tried: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def wrong(self, kind: str, text: str) -> None:
        """Note what went wrong.

        Raises:
            ValueError: there is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is none of {KINDS}")
        self.problems.append((kind, text))

    def row(self) -> list[str]:
        """Return the line of the table: the name, what was tried, the problems by kind, the ends."""
        kinds = Counter(kind for kind, _ in self.problems)
        ends = ", ".join(f"{word} {number:,}" for word, number in self.ends.most_common())
        return [self.group, f"{self.tried:,}", *(f"{kinds[kind]:,}" for kind in KINDS), ends]
