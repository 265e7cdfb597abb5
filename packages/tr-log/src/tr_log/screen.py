"""Draw bars at the foot of a terminal, with everything else that is printed above them."""

from __future__ import annotations

import atexit
import contextlib
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol, TextIO

from tr_log.above_bars import AboveBars, printing_above
from tr_log.terminal import write_line

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

SECONDS_BETWEEN_DRAWINGS = 0.1


class Drawable(Protocol):
    """Something that a screen shows on one line."""

    def draw(self, width: int) -> Text:
        """Return the line, at most `width` characters wide."""
        ...


class Screen:
    """The bars on one terminal. It is taken over with the first bar and given back with the last.

    Nothing is redrawn in the background: a bar that moves asks for a drawing, and is refused more than ten a
    second.

    Args:
        stream: a terminal.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._bars: list[Drawable] = []
        self._live: Live | None = None
        self._width = 80
        self._taken = ExitStack()
        self._next_s = 0.0

    @property
    def bar_characters(self) -> tuple[str, str]:
        """What the done and the open part of a bar are drawn with."""
        fine = (getattr(self._stream, "encoding", None) or "").lower().replace("-", "").startswith("utf")
        return ("━", "─") if fine else ("#", "-")

    @classmethod
    def on(cls, stream: TextIO) -> Screen:
        """Return the screen that already draws on `stream`, or a new one."""
        if not isinstance(stream, AboveBars):
            return cls(stream)
        return stream.owner if isinstance(stream.owner, cls) else cls(stream.stream)

    def add(self, bar: Drawable) -> None:
        """Show a bar below the others."""
        self._bars.append(bar)
        if self._live is None:
            self._take()
        self.draw()

    def remove(self, bar: Drawable) -> None:
        """Show a bar no longer."""
        if bar not in self._bars:
            return
        if len(self._bars) == 1:
            self.close()
        else:
            self._bars.remove(bar)
            self.draw()

    def is_due(self) -> bool:
        """Return whether enough time has passed since the last drawing."""
        return time.perf_counter() >= self._next_s

    def draw(self) -> None:
        """Draw all bars now."""
        if self._live is not None:
            try:
                self._live.refresh()
            except (OSError, ValueError):
                self._give_up()
        self._next_s = time.perf_counter() + SECONDS_BETWEEN_DRAWINGS

    def write(self, line: str) -> None:
        """Write a line above the bars; it may hold colour codes."""
        if self._live is None:
            write_line(self._stream, line)
            return
        from rich.text import Text

        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        shown = line.encode(encoding, "backslashreplace").decode(encoding)
        try:
            self._live.console.print(Text.from_ansi(shown), soft_wrap=True)
        except (OSError, ValueError):
            self._give_up()

    def close(self) -> None:
        """Take all bars away and give the terminal back."""
        live, self._live = self._live, None
        if live is not None:
            atexit.unregister(self.close)
            with contextlib.suppress(OSError, ValueError):
                live.stop()
        self._bars.clear()
        self._taken.close()

    def _take(self) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=self._stream, force_terminal=True)
        # transient: what stays on the terminal are lines of text, which can be read and copied.
        live = self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=self._render,
        )
        self._taken.enter_context(printing_above(self.write, self))
        atexit.register(self.close)  # an error outside the training loop must not leave the cursor hidden
        try:
            live.start()
        except (OSError, ValueError):
            self._give_up()

    def _render(self) -> Text:
        from rich.text import Text

        if self._live is not None:
            self._width = self._live.console.width
        # One column is left free: some terminals break the line after writing into the last.
        return Text("\n").join(bar.draw(self._width - 1) for bar in list(self._bars))

    def _give_up(self) -> None:
        # The terminal is gone (a closed connection); the training is not.
        self.close()
