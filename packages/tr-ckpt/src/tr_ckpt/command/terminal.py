"""Print tables that fit the terminal, lines without control characters, and the progress of reading."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich import progress
from rich.console import Console

from tr_log.formatting import printable

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
    """Return how many characters fit a line; None, no limit, if the output is not a terminal and COLUMNS is unset."""
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


class Progress:
    """A progress line on stderr, gone at the end; nothing is drawn if that is not a terminal.

    Args:
        total_bytes: how much will be read.
    """

    def __init__(self, total_bytes: int) -> None:
        self._bars = progress.Progress(
            progress.TaskProgressColumn(),
            progress.BarColumn(24),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TextColumn("{task.description}", markup=False),
            console=Console(file=sys.stderr),
            transient=True,
            disable=not sys.stderr.isatty(),
        )
        self._task = self._bars.add_task("", total=total_bytes)
        self._bars.start()

    def begin(self, what: str) -> None:
        """Name what is read now."""
        self._bars.update(self._task, description=printable(what))

    def advance(self, size_bytes: int) -> None:
        """Add to the bytes read."""
        self._bars.advance(self._task, size_bytes)

    def end(self) -> None:
        """Clear the line."""
        self._bars.stop()
