"""Print tables that fit the terminal, lines without control characters, and the progress of reading."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from tr_log.formatting import printable, size

_GAP = "  "


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: its title.
        cells: its content, one a row.
        right: whether it is aligned to the right, as numbers are.
        spare: columns with a higher number are left out first if the table is too wide; 0 never.
    """

    heading: str
    cells: Sequence[str]
    right: bool = False
    spare: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "heading", printable(self.heading))
        object.__setattr__(self, "cells", [printable(cell) for cell in self.cells])

    @property
    def width(self) -> int:
        """Its width in characters."""
        return max(map(len, (self.heading, *self.cells)))


def say(line: str = "", file: TextIO | None = None) -> None:
    """Print one line, with its content escaped: see `printable`."""
    print(printable(line), file=file)


def say_lines(text: str) -> None:
    """Print lines of our own text; foreign parts cannot contain line breaks."""
    for line in text.split("\n"):
        say(line)


def terminal_width() -> int | None:
    """Return how many characters fit a line; None, no limit, if the output is no terminal and COLUMNS is unset."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


def render(columns: Sequence[Column], width: int | None) -> str:
    """Return a table. Empty columns are left out, and spare ones if it is too wide.

    If that is not enough, the first column is shortened in its middle.
    """
    shown = [column for column in columns if any(column.cells)]
    while width is not None and _width(shown) > width and any(column.spare for column in shown):
        shown.remove(max(shown, key=lambda column: column.spare))
    room = None if width is None else max(12, shown[0].width - (_width(shown) - width))
    first = Column(shown[0].heading, [shorten(cell, room) for cell in shown[0].cells])
    return "\n".join(_line([first, *shown[1:]], row) for row in range(-1, len(first.cells)))


def shorten(text: str, width: int | None) -> str:
    """Return `text`, shortened in its middle if it is longer than `width` characters; None is no limit."""
    if width is None or len(text) <= width:
        return text
    end = (width - 1) * 2 // 3  # names differ at their ends more often
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def _width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def _line(columns: Sequence[Column], row: int) -> str:
    cells = []
    for column in columns:
        text = column.heading if row < 0 else column.cells[row]
        cells.append(text.rjust(column.width) if column.right else text.ljust(column.width))
    return _GAP.join(cells).rstrip()


_BAR = 24
_PERIOD_S = 0.1


class Progress:
    """A progress line on stderr, redrawn in place; nothing is drawn if that is no terminal.

    Args:
        total_bytes: how much will be read.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._done = 0
        self._what = ""
        self._drawn = 0
        self._begun_s = self._last_s = time.monotonic()
        self._shown = sys.stderr.isatty()

    def begin(self, what: str) -> None:
        """Name what is read now."""
        self._what = printable(what)

    def advance(self, size_bytes: int) -> None:
        """Add to the bytes read."""
        self._done += size_bytes
        now_s = time.monotonic()
        if self._shown and now_s - self._last_s >= _PERIOD_S:
            self._last_s = now_s
            self._draw(now_s - self._begun_s)

    def end(self) -> None:
        """Clear the line."""
        if self._drawn:
            print("\r" + " " * self._drawn, end="\r", file=sys.stderr, flush=True)
            self._drawn = 0

    def _draw(self, elapsed_s: float) -> None:
        share = min(1.0, self._done / max(self._total, 1))
        bar = ("#" * round(share * _BAR)).ljust(_BAR, ".")
        speed = size(self._done / max(elapsed_s, 1e-9))
        text = f"{share:4.0%} [{bar}] {size(self._total)}, {speed}/s, {self._what}"[:79]
        print("\r" + text.ljust(self._drawn), end="", file=sys.stderr, flush=True)
        self._drawn = len(text)
