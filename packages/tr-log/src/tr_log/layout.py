"""Place bars and figures on lines, for a terminal or a notebook, by rich."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

LONGEST_BAR, SHORTEST_BAR = 40, 10
MOST_LINES_OF_FIGURES = 3


class Figure(NamedTuple):
    """A number under a bar: `loss 0.5` or `812 samples/s`, of which only the number is bright."""

    before: str
    value: str
    after: str = ""

    def __str__(self) -> str:
        return "".join(self)


class Row(NamedTuple):
    """What a bar shows.

    Attributes:
        name: name of the work.
        share: how much is done, from 0 to 1; None without a known total.
        cells: position, percentage, time left and speed; empty where not known. The last are the first to go where
            the terminal is narrow.
        figures: numbers below the bars.
    """

    name: str
    share: float | None
    cells: tuple[str, str, str, str]
    figures: Sequence[Figure] = ()


class Drawn(Protocol):
    """Something that a display shows as a bar."""

    def row(self) -> Row:
        """Return what it shows now."""
        ...


class Layout:
    """Place bars and figures on lines.

    No column becomes narrower, because numbers that move are hard to read.
    """

    def __init__(self) -> None:
        self._name, self._cells = 0, [0, 0, 0, 0]
        self._figures: dict[str, int] = {}
        self._pieces: dict[str, int] = {}

    def entry(self, pieces: Sequence[str], width: int) -> list[str]:
        """Return a log entry on lines of at most `width` characters: values below those of the same name before."""
        lines = [""]
        for piece in pieces:
            name = piece.partition(" ")[0]
            if name.isidentifier():  # a number begins what has no name
                self._pieces[name] = max(self._pieces.get(name, 0), len(piece))
            if lines[-1] and len(lines[-1] + piece) > width:
                lines.append("    ")
            lines[-1] += piece.ljust(self._pieces.get(name, 0)) + "  "
        return [line.rstrip() for line in lines]

    def lines(self, rows: Sequence[Row], console: Console, width: int, height: int) -> list[Text]:
        """Return at most `height` lines of at most `width` characters."""
        lines = [*self._bars(rows, console, width), *self._below([f for row in rows for f in row.figures], width)]
        for line in lines:
            line.truncate(width)
            line.rstrip()
        return lines[: max(height, 1)]

    def _bars(self, rows: Sequence[Row], console: Console, width: int) -> list[Text]:
        from rich.text import Text

        self._name = max([self._name, *(len(row.name) for row in rows)])
        self._cells = [max([known, *(len(row.cells[i]) for row in rows)]) for i, known in enumerate(self._cells)]
        shown = [i for i, length in enumerate(self._cells) if length]

        def room() -> int:
            return width - self._name - 1 - sum(self._cells[i] + 2 for i in shown)

        while len(shown) > 1 and room() < SHORTEST_BAR:
            shown.pop()
        bar = min(room(), LONGEST_BAR) if any(row.share is not None for row in rows) else 0
        lines = []
        for row in rows:
            line = Text(no_wrap=True).append(row.name.ljust(self._name), style="bold").append(" ")
            if bar >= SHORTEST_BAR:
                line.append_text(_bar(row.share, console, bar)).append("  ")
            # In reading order; the percentage belongs to the position, and the time left comes last.
            cells = [row.cells[0].rjust(self._cells[0]), *(row.cells[i].ljust(self._cells[i]) for i in (1, 2, 3))]
            line.append("  ".join(cells[i] for i in (0, 1, 3, 2) if i in shown))
            lines.append(line)
        return lines

    def _below(self, figures: Sequence[Figure], width: int) -> list[Text]:
        from rich.text import Text

        lines: list[Text] = []
        for figure in figures:
            name = figure.before or figure.after
            known = self._figures[name] = max(self._figures.get(name, 0), len(str(figure)))
            cell = Text(no_wrap=True).append(figure.before, style="dim").append(figure.value)
            cell.append(figure.after, style="dim").append(" " * (known - len(str(figure))))
            if lines and lines[-1].cell_len + 2 + known <= width:
                lines[-1].append("  ").append_text(cell)
            else:
                lines.append(cell)
        return lines[:MOST_LINES_OF_FIGURES]


class Display(ABC):
    """Where bars are drawn, and lines are written above them.

    Attributes:
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._bars: list[Drawn] = []
        self._layout = Layout()
        self._next_s = 0.0  # when a drawing is due

    def add(self, bar: Drawn) -> None:
        """Show a bar below the others."""
        self._bars.append(bar)
        self.draw()

    def remove(self, bar: Drawn) -> None:
        """Remove a bar."""
        if bar in self._bars:
            self._bars.remove(bar)
            self.draw()

    def is_due(self) -> bool:
        """Return whether enough time has passed since the last drawing for a bar that has only advanced."""
        return self.clock() >= self._next_s

    @abstractmethod
    def draw(self) -> None:
        """Draw all bars now, unless there were many drawings in the last second."""

    @abstractmethod
    def write(self, line: str, style: str = "") -> None:
        """Write a line above the bars, in a style of rich's; it may contain colour codes."""

    @abstractmethod
    def log(self, pieces: Sequence[str], step: int, entry: Mapping[str, Any], style: str = "") -> None:
        """Show a log entry; `pieces` are its names and values as text."""


def _bar(share: float | None, console: Console, width: int) -> Text:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    text = Text()
    if share is None:
        return text.append(" " * width)
    done, half, open_ = "━╸─" if console.encoding.startswith("utf") else "#--"
    bar = ProgressBar(total=1.0, completed=share, width=width, complete_style="green", finished_style="green")
    back = console.get_style(bar.style)
    for segment in console.render(bar, console.options.update(width=width)):
        if segment.style != back:
            text.append(segment.text.replace("-", done).replace("╸", half), segment.style)
    # The rest has a character of its own: not every terminal and notebook shows rich's grey as what is not done.
    return text.append(open_ * (width - text.cell_len), style="dim")
