"""Draw bars at the bottom of a terminal, and print everything else above them.

`is_terminal` detects a terminal, where bars can be redrawn; files, pipes and logs of build servers are none. While a
`Screen` shows bars, output to stdout, to stderr and of log handlers on these goes above the bars.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from tr_log.streams import write_text

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether bars may be drawn on `stream`.

    It must be a terminal that can move its cursor (TERM is not `dumb`), and the variable CI must not be set. Build
    servers often pretend to have a terminal, and then log every redrawn bar as a line.
    """
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    if os.environ.get("TERM", "").lower() == "dumb":
        return False
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no stream, or a closed one
        return stream is not None and stream.isatty()
    return False


def write_line(stream: TextIO | None, line: str) -> None:
    """Write one line at once. A lost stream (a closed pipe, a lost terminal) raises no error."""
    write_text(stream, line + "\n")


class StreamRedirect(io.TextIOBase):
    """Replace a terminal stream, and pass on whole lines.

    The beginning of a line waits for its end. If a line is overwritten with carriage returns, as other libraries' bars
    do, only its last text is passed on.

    Args:
        stream: the terminal stream it replaces.
        write_line: takes a line without its line break.
        owner: the object that draws the bars.
    """

    def __init__(self, stream: TextIO, write_line: Callable[[str], None], owner: object) -> None:
        self.stream = stream
        self.owner = owner
        self._write_line = write_line
        self._begun = ""
        self._is_released = False
        self._process = os.getpid()

    def write(self, text: str) -> int:
        """Write text and pass on the lines that it completes; once released, write to the terminal."""
        if self._is_released or os.getpid() != self._process:  # a forked worker has no bars to redraw
            return self.stream.write(text)
        *lines, rest = (self._begun + text).split("\n")
        self._begun = ""  # cleared first, because `write_line` may itself print
        for line in lines:
            self._write_line(_overwritten(line))
        self._begun += rest
        return len(text)

    def flush(self) -> None:
        """Flush the terminal's stream only; an incomplete line waits."""
        self.stream.flush()

    def release(self) -> None:
        """Write the incomplete line to the terminal, and from now on all text.

        Other code may keep a reference to this object as its stream.
        """
        self._is_released = True
        if self._begun:
            write_text(self.stream, _overwritten(self._begun))
            self._begun = ""

    def isatty(self) -> bool:
        """Return True, because it replaces a terminal."""
        return True

    def fileno(self) -> int:
        """Return the terminal's descriptor."""
        return self.stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def redirect_output(write_line: Callable[[str], None], owner: object) -> Iterator[None]:
    """Send the lines of `sys.stdout`, `sys.stderr` and the log handlers on them to `write_line`.

    Only streams that are terminals are redirected. Output to a file still goes there.
    """
    proxies = [
        (name, StreamRedirect(stream, write_line, owner))
        for name in ("stdout", "stderr")
        if (stream := getattr(sys, name)) is not None and is_terminal(stream) and not isinstance(stream, StreamRedirect)
    ]
    # A handler keeps its first stream, so a script's basicConfig would write into the bar.
    handlers = [(h, proxy) for _, proxy in proxies for h in _handlers() if _terminal(vars(h)["stream"]) is proxy.stream]
    for name, proxy in proxies:
        setattr(sys, name, proxy)
    for handler, proxy in handlers:
        handler.setStream(proxy)
    try:
        yield
    finally:
        for name, proxy in proxies:
            if getattr(sys, name) is proxy:
                setattr(sys, name, proxy.stream)
        for handler, proxy in handlers:
            if handler.stream is proxy:
                handler.setStream(proxy.stream)
        for _, proxy in proxies:
            proxy.release()


def _handlers() -> list[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger()]
    loggers += [known for known in logging.Logger.manager.loggerDict.values() if isinstance(known, logging.Logger)]
    streaming = {h for logger in loggers for h in logger.handlers if isinstance(h, logging.StreamHandler)}
    # A handler without its own stream, such as logging.lastResort, reads sys.stderr each time.
    return [handler for handler in streaming if "stream" in vars(handler)]


def _terminal(stream: object) -> object:
    return stream.stream if isinstance(stream, StreamRedirect) else stream


def _overwritten(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


SECONDS_BETWEEN_DRAWINGS = 0.1


class Drawable(Protocol):
    """Something that a screen shows on one line."""

    def draw(self, width: int) -> Text:
        """Return the line, at most `width` characters wide."""
        ...


class Screen:
    """The bars on one terminal. Output is redirected from the first bar until the last is closed.

    Nothing is redrawn in the background. A bar that advances asks whether a drawing is due, at most ten times a second.

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
        """The characters of the done and the open part of a bar."""
        fine = (getattr(self._stream, "encoding", None) or "").lower().replace("-", "").startswith("utf")
        return ("━", "─") if fine else ("#", "-")

    @classmethod
    def on(cls, stream: TextIO) -> Screen:
        """Return the screen that already draws on `stream`, or a new one."""
        if not isinstance(stream, StreamRedirect):
            return cls(stream)
        return stream.owner if isinstance(stream.owner, cls) else cls(stream.stream)

    def add(self, bar: Drawable) -> None:
        """Show a bar below the others."""
        self._bars.append(bar)
        if self._live is None:
            self._take()
        self.draw()

    def remove(self, bar: Drawable) -> None:
        """Remove a bar."""
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
        """Write a line above the bars; it may contain colour codes."""
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
        """Remove all bars and restore the terminal."""
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
        # transient: only lines of text stay on the terminal, which can be read and copied.
        live = self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=self._render,
        )
        self._taken.enter_context(redirect_output(self.write, self))
        atexit.register(self.close)  # an error outside the training loop must not leave the cursor hidden
        try:
            live.start()
        except (OSError, ValueError):
            self._give_up()

    def _render(self) -> Text:
        from rich.text import Text

        if self._live is not None:
            self._width = self._live.console.width
        # One column stays free, because some terminals break the line after the last one.
        return Text("\n").join(bar.draw(self._width - 1) for bar in list(self._bars))

    def _give_up(self) -> None:
        # The terminal is lost (a closed connection), but the training continues.
        self.close()
