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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from tr_log.layout import Display, Drawn
from tr_log.terminal import StreamRedirect, is_taken_by_rich, redirect_output, take_written_at_once, write_line

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

MOST_DRAWINGS_A_SECOND = 10
SECONDS_BETWEEN_DRAWINGS = 0.2  # of a bar that advances; what changes for longer is drawn in between
SHARE_OF_DRAWING, LONGEST_BETWEEN_DRAWINGS_S = 0.01, 2.0  # of the time, at most; a terminal may be slow
LEFT_ALONE_S = 1.0


class Screen(Display):
    """The bars on one terminal. Output is redirected from the first bar until the last is closed.

    Nothing is redrawn in the background. A bar that advances asks whether a drawing is due.

    Args:
        stream: a terminal.
        clock: a monotonic clock, in seconds.

    Attributes:
        is_aside: whether other code draws a display of its own, and this one is not shown.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(clock)
        self.is_aside = False
        self._stream = stream
        self._console: Console | None = None
        self._live: Live | None = None
        self._size = (80, 24)
        self._lengths: list[int] = []  # of the lines on the terminal
        self._again: list[str] = []  # what a signal handler has written over the bars
        self._redirects: list[StreamRedirect] = []
        self._taken = ExitStack()
        self._return_s = 0.0
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
        if self._console is None:
            self._take()
        super().add(bar)

    def remove(self, bar: Drawn) -> None:
        """Remove a bar."""
        if self._bars == [bar]:
            self.close()
        else:
            super().remove(bar)

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
                self._print_again()
            except (OSError, ValueError):
                self._give_up()
            self._drawn_s.append(began_s)
            if self._is_drawn:  # the first drawing imports rich
                took_s = self.clock() - began_s
                self._next_s = max(self._next_s, began_s + min(took_s / SHARE_OF_DRAWING, LONGEST_BETWEEN_DRAWINGS_S))
            self._is_drawn = True

    def log(self, pieces: Sequence[str], step: int, entry: Mapping[str, Any], style: str = "") -> None:
        """Write an entry in columns, on as many lines as the width of the terminal needs."""
        for line in self._layout.entry(pieces, _window(self._stream)[0] - 1):
            self.write(line, style)

    def write(self, line: str, style: str = "") -> None:
        """Write a line above the bars, in a style of rich's, wrapped at words; it may contain colour codes."""
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
                self._print_again()
                text = Text.from_ansi(shown, style=style)
                parts = text.divide(_breaks(text.plain, self._size[0] - 1))
                self._live.console.print(Text("\n").join(parts), soft_wrap=True)
            except (OSError, ValueError):
                self._give_up()

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
            take_written_at_once()  # before there was anything to draw around it
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
                self._print_again()
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
        # One column stays free, because some terminals break the line after the last one, and two for an echoed ^C.
        lines = self._layout.lines([bar.row() for bar in list(self._bars)], self._console, width - 3, height - 2)
        begun = [line for redirect in self._redirects if (line := Text.from_ansi(redirect.begun, no_wrap=True)).plain]
        for line in begun:
            line.truncate(width - 3)
        lines = [*begun, *lines]
        self._lengths = [line.cell_len for line in lines]
        return Text("\n").join(lines)

    def _adapt(self) -> bool:
        """Adapt to the size of the window, and return whether it has changed.

        A window that became narrower broke the lines on it: what is below the first row of each is erased here, because
        rich erases as many rows as it has written lines.
        """
        assert self._console is not None
        size, texts = _window(self._stream), take_written_at_once()
        if texts and self._lengths and _is_same_terminal(self._stream):
            rows = sum(1 + max(-(-len(text) // size[0]), 1) for text in texts)
            self._stream.write("\r" + "\x1b[2K\x1b[1A" * rows)  # printed again above the bars
            self._again += texts
        if size == self._size:
            return False
        if self._lengths and size[0] < self._size[0] and _breaks_lines_again():
            rows = sum(max(-(-length // size[0]), 1) - 1 for length in self._lengths)
            self._stream.write("\r" + "\x1b[2K\x1b[1A" * rows)
        self._console.size = self._size = size  # type: ignore[assignment]
        return True

    def _print_again(self) -> None:
        while self._again:
            text = self._again.pop(0)
            if self._live is None:
                write_line(self._stream, text)
            else:
                self._live.console.print(text, soft_wrap=True, markup=False, highlight=False, emoji=False)

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
            ends = [*_breaks(line, _window(self._stream)[0]), len(line)]
            pieces = [line[begin:end].rstrip() for begin, end in pairwise([0, *ends])]
            write_line(self._stream, "\n" * self._is_mid_line + "\n".join(pieces))
            self._is_mid_line = False

    def _give_up(self) -> None:
        # The terminal is lost (a closed connection), but the training continues.
        self.close()


def _breaks(text: str, width: int) -> list[int]:
    """Return before which words a text is broken; one that is longer than a line, as a path, can be copied whole."""
    breaks, begin = [], 0
    for word in re.finditer(r"\S+", text):
        if word.end() - begin > width and word.start() > begin:
            begin = word.start()
            breaks.append(begin)
    return breaks


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


def _is_same_terminal(stream: TextIO) -> bool:
    """Return whether `stream` is where the descriptor of stderr goes."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        return os.path.sameopenfile(stream.fileno(), 2)
    return False


def _breaks_lines_again() -> bool:
    """Return whether the terminal breaks long lines when it becomes narrower; some cut them off instead."""
    cuts = any(name in os.environ for name in ("XTERM_VERSION", "STY")) or os.environ.get("TERM") == "linux"
    return not cuts or "TMUX" in os.environ
