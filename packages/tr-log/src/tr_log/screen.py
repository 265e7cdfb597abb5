"""Draw bars and figures at the bottom of a terminal by rich, and print everything else above them."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TextIO

from tr_log.terminal import StreamRedirect, is_taken_by_rich, redirect_output, write_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

MOST_DRAWINGS_A_SECOND = 10
SECONDS_BETWEEN_DRAWINGS = 0.2  # of a bar that advances; what changes for longer is drawn in between
SHARE_OF_DRAWING, LONGEST_BETWEEN_DRAWINGS_S = 0.01, 2.0  # of the time, at most; a terminal may be slow
LEFT_ALONE_S = 1.0
LONGEST_BAR, SHORTEST_BAR = 40, 10
MOST_LINES_OF_FIGURES = 3


class Figure(NamedTuple):
    """A number under a bar: `loss 0.5` or `812 samples/s`, of which only the number is bright."""

    before: str
    value: str
    after: str = ""

    def __str__(self) -> str:
        return "".join(self)


@dataclass(frozen=True)
class Row:
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


class Screen:
    """The bars on one terminal. Output is redirected from the first bar until the last is closed.

    Nothing is redrawn in the background. A bar that advances asks whether a drawing is due.

    Args:
        stream: a terminal.
        clock: a monotonic clock, in seconds.

    Attributes:
        is_aside: whether other code draws a display of its own, and this one is not shown.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock, self.is_aside = clock, False
        self._stream = stream
        self._bars: list[Drawn] = []
        self._layout = Layout()
        self._console: Console | None = None
        self._live: Live | None = None
        self._size = (80, 24)
        self._lengths: list[int] = []  # of the lines on the terminal
        self._redirects: list[StreamRedirect] = []
        self._taken = ExitStack()
        self._next_s, self._return_s = 0.0, 0.0
        self._drawn_s = deque([float("-inf")] * MOST_DRAWINGS_A_SECOND, maxlen=MOST_DRAWINGS_A_SECOND)
        self._hides_cursor = self._is_drawn = False
        self._is_mid_line = _has_open_tqdm()
        self._lock = threading.RLock()

    @classmethod
    def on(cls, stream: TextIO) -> Screen:
        """Return the screen that already draws on `stream`, or a new one."""
        if not isinstance(stream, StreamRedirect):
            return cls(stream)
        return stream.owner if isinstance(stream.owner, cls) else cls(stream.stream)

    def add(self, bar: Drawn) -> None:
        """Show a bar below the others."""
        self._bars.append(bar)
        if self._console is None:
            self._take()
        self.draw()

    def remove(self, bar: Drawn) -> None:
        """Remove a bar."""
        if bar not in self._bars:
            return
        if len(self._bars) == 1:
            self.close()
        else:
            self._bars.remove(bar)
            self.draw()

    def is_due(self) -> bool:
        """Return whether enough time has passed since the last drawing for a bar that has only advanced."""
        return self.clock() >= self._next_s

    def draw(self) -> None:
        """Draw all bars now, unless there were ten drawings in the last second."""
        with self._lock:
            began_s = self.clock()
            self._next_s = began_s + SECONDS_BETWEEN_DRAWINGS
            if self._console is None or began_s < self._drawn_s[0] + 1 or (self.is_aside and not self._returns()):
                return
            try:
                self._adapt()
                self._shown().refresh()
            except (OSError, ValueError):
                self._give_up()
            self._drawn_s.append(began_s)
            if self._is_drawn:  # the first drawing imports rich
                took_s = self.clock() - began_s
                self._next_s = max(self._next_s, began_s + min(took_s / SHARE_OF_DRAWING, LONGEST_BETWEEN_DRAWINGS_S))
            self._is_drawn = True

    def write(self, line: str) -> None:
        """Write a line above the bars; it may contain colour codes."""
        with self._lock:
            if self._live is None:
                self._write_without_bars(line)
                return
            from rich.text import Text

            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            shown = line.encode(encoding, "backslashreplace").decode(encoding)
            try:
                if self._adapt():
                    self._live.refresh()
                self._live.console.print(Text.from_ansi(shown), soft_wrap=True)
            except (OSError, ValueError):
                self._give_up()

    def log(self, line: str, step: int, entry: object) -> None:
        """Write the line of a log entry."""
        self.write(line)

    def show_begun(self) -> None:
        """Show the beginning of a line, if a drawing is due."""
        if self.is_due():
            self.draw()

    def step_aside(self, text: str) -> None:
        """Leave the terminal to other code, which is about to write `text`, until it has written nothing for a second.

        If it hides the cursor, as a live display of rich does, it has the terminal until it shows the cursor.
        """
        with self._lock:
            self._stop_live()
            self.is_aside = True
            self._return_s = self.clock() + LEFT_ALONE_S
            shows, hides = text.rfind("\x1b[?25h"), text.rfind("\x1b[?25l")
            self._hides_cursor = hides > shows or (self._hides_cursor and shows < 0)
            if visible := _CODE.sub("", text):
                self._is_mid_line = not visible.endswith(("\n", "\r"))

    def close(self) -> None:
        """Remove all bars and restore the terminal."""
        with self._lock:
            if self._console is None:
                return
            try:
                self._stop_live()
            finally:
                self._console, self.is_aside = None, False
                atexit.unregister(self.close)
                self._bars.clear()
                self._taken.close()
                self._redirects = []

    def _take(self) -> None:
        from rich.console import Console

        self._console = Console(file=self._stream, force_terminal=True)
        self._redirects = self._taken.enter_context(redirect_output(self))
        atexit.register(self.close)  # an error outside the training loop must not leave the cursor hidden

    def _shown(self) -> Live:
        """Return the live display, begun if it is not."""
        if self._live is None:
            from rich.live import Live

            # transient: only lines of text stay on the terminal, which can be read and copied.
            self._live = Live(
                console=self._console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
                get_renderable=self._render,
            )
            self._lengths = []
            if self._is_mid_line:
                self._stream.write("\n")
                self._is_mid_line = False
            self._live.start()
        return self._live

    def _stop_live(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            try:
                self._adapt()
                live.stop()
            except (OSError, ValueError):
                pass
            except BaseException:  # a second Ctrl-C
                self._stream.write("\x1b[?25h")
                raise
            self._lengths = []

    def _render(self) -> Text:
        from rich.text import Text

        assert self._console is not None
        width, height = self._size
        # One column stays free, because some terminals break the line after the last one.
        lines = self._layout.lines([bar.row() for bar in list(self._bars)], self._console, width - 1, height - 2)
        begun = [line for redirect in self._redirects if (line := Text.from_ansi(redirect.begun, no_wrap=True)).plain]
        for line in begun:
            line.truncate(width - 1)
        lines = [*begun, *lines]
        self._lengths = [line.cell_len for line in lines]
        return Text("\n").join(lines)

    def _adapt(self) -> bool:
        """Adapt to the size of the window, and return whether it has changed.

        A window that became narrower broke the lines on it: what is below the first row of each is erased here, because
        rich erases as many rows as it has written lines.
        """
        assert self._console is not None
        size = _window(self._stream)
        if size == self._size:
            return False
        if self._lengths and size[0] < self._size[0] and _breaks_lines_again():
            rows = sum(max(-(-length // size[0]), 1) - 1 for length in self._lengths)
            self._stream.write("\r" + "\x1b[2K\x1b[1A" * rows)
        self._console.size = self._size = size  # type: ignore[assignment]
        return True

    def _returns(self) -> bool:
        if self._hides_cursor or self.clock() < self._return_s:
            return False
        self.is_aside = False
        with contextlib.suppress(OSError, ValueError):
            self._stream.write("\r\x1b[J")  # what is left of a display
            self._is_mid_line = False
        return True

    def _write_without_bars(self, line: str) -> None:
        if self.is_aside and is_taken_by_rich(sys.stderr):
            print(line, file=sys.stderr)  # above that display
        else:
            write_line(self._stream, "\n" * self._is_mid_line + line)
            self._is_mid_line = False

    def _give_up(self) -> None:
        # The terminal is lost (a closed connection), but the training continues.
        self.close()


_CODE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def _has_open_tqdm() -> bool:
    """Return whether a bar of tqdm is open: the cursor is at the end of its line then."""
    known = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
    return any(not getattr(bar, "disable", True) for bar in list(known))


def _window(stream: TextIO) -> tuple[int, int]:
    """Return the columns and lines of a terminal; 80 and 24 if it does not say."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        columns, lines = os.get_terminal_size(stream.fileno())
        if columns and lines:
            return columns, lines
    return int(os.environ.get("COLUMNS") or 80), 24


def _breaks_lines_again() -> bool:
    """Return whether the terminal breaks long lines when it becomes narrower; some cut them off instead."""
    cuts = any(name in os.environ for name in ("XTERM_VERSION", "STY")) or os.environ.get("TERM") == "linux"
    return not cuts or "TMUX" in os.environ
