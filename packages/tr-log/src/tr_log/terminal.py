"""Draw bars at the foot of a terminal, and print everything else above them.

`is_terminal` tells a terminal, where bars can be redrawn, from a file, a pipe or a build server's log. While a
`Screen` shows bars, what others print to stdout, to stderr or through log handlers on these goes above the bars.
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

    That takes a terminal that can move its cursor (the environment's TERM is not `dumb`), and that the
    environment's CI is not set: build servers often pretend to have a terminal and then keep every redrawn
    bar as a line.
    """
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    if os.environ.get("TERM", "").lower() == "dumb":
        return False
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no stream at all, or a closed one
        return stream is not None and stream.isatty()
    return False


def write_line(stream: TextIO | None, line: str) -> None:
    """Write one line at once; a stream that is gone (a closed pipe, a lost terminal) ends no training."""
    write_text(stream, line + "\n")


class StreamRedirect(io.TextIOBase):
    """A stand-in for a terminal stream that hands over whole lines.

    The beginning of a line waits for its end. Where something returns to the start of the line to write over
    it, as other libraries' bars do, only what was written last is handed over.

    Args:
        stream: the terminal stream it stands for.
        write_line: takes a line without its end.
        owner: whoever draws the bars.
    """

    def __init__(self, stream: TextIO, write_line: Callable[[str], None], owner: object) -> None:
        self.stream = stream
        self.owner = owner
        self._write_line = write_line
        self._begun = ""
        self._is_released = False
        self._process = os.getpid()

    def write(self, text: str) -> int:
        """Take text and hand over the lines that it completes; once released, pass it on to the terminal."""
        if self._is_released or os.getpid() != self._process:  # a forked worker has no bars to draw anew
            return self.stream.write(text)
        *lines, rest = (self._begun + text).split("\n")
        self._begun = ""  # before handing over: what shows the lines may itself print
        for line in lines:
            self._write_line(_overwritten(line))
        self._begun += rest
        return len(text)

    def flush(self) -> None:
        """Do nothing but flush the terminal's stream: a line goes out when it is complete."""
        self.stream.flush()

    def release(self) -> None:
        """Write the line that was begun to the terminal itself, and from now on everything.

        Somebody may have taken this object for the terminal's stream and keep it.
        """
        self._is_released = True
        if self._begun:
            write_text(self.stream, _overwritten(self._begun))
            self._begun = ""

    def isatty(self) -> bool:
        """Return True: it stands for a terminal."""
        return True

    def fileno(self) -> int:
        """Return the terminal's descriptor."""
        return self.stream.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def redirect_output(write_line: Callable[[str], None], owner: object) -> Iterator[None]:
    """Let `sys.stdout`, `sys.stderr` and the log handlers on them hand their lines to `write_line`.

    Only those of them that are terminals: what was led into a file goes on going there.
    """
    proxies = [
        (name, StreamRedirect(stream, write_line, owner))
        for name in ("stdout", "stderr")
        if (stream := getattr(sys, name)) is not None and is_terminal(stream) and not isinstance(stream, StreamRedirect)
    ]
    # A handler keeps the stream that it was made with, so a script's basicConfig would write into the bar.
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
    # One without a stream of its own, such as logging.lastResort, looks sys.stderr up each time.
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
        # One column is left free: some terminals break the line after writing into the last.
        return Text("\n").join(bar.draw(self._width - 1) for bar in list(self._bars))

    def _give_up(self) -> None:
        # The terminal is gone (a closed connection); the training is not.
        self.close()
