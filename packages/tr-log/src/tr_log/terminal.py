"""Take over a terminal: what is printed there goes to whoever draws on it, line by line.

`is_terminal` detects a terminal, where bars can be redrawn; files, pipes and logs of build servers are none.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TextIO

from tr_log.streams import write_text


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether bars may be drawn on `stream`.

    It must be a terminal that can move its cursor (TERM is not `dumb`), and the variable CI must not be set. Build
    servers often pretend to have a terminal, and then log every redrawn bar as a line. A terminal on which the script
    shows a live display of rich is none either: two displays would overwrite each other, while lines appear above it.
    """
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        return False
    if os.environ.get("TERM", "").lower() == "dumb" or is_taken_by_rich(stream):
        return False
    with contextlib.suppress(AttributeError, ValueError, OSError):  # no stream, or a closed one
        return stream is not None and stream.isatty()
    return False


def is_taken_by_rich(stream: object) -> bool:
    """Return whether `stream` is what a live display of rich puts in the place of a stream."""
    return hasattr(type(stream), "rich_proxied_file")


def write_line(stream: TextIO | None, line: str) -> None:
    """Write one line at once. A lost stream (a closed pipe, a lost terminal) raises no error."""
    write_text(stream, line + "\n")


_at_once: list[str] = []


def write_at_once(text: str) -> None:
    """Write a line to the descriptor of stderr, as a signal handler must; a display of bars then draws around it."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())
        _at_once.append(text)


def take_written_at_once() -> list[str]:
    """Return what `write_at_once` has written since the last call."""
    texts = _at_once[:]
    del _at_once[: len(texts)]
    return texts


class Owner(Protocol):
    """Who draws on a terminal."""

    is_aside: bool

    def write(self, line: str) -> None:
        """Write a line without its line break."""
        ...

    def show_begun(self) -> None:
        """Show the beginning of a line, which has changed."""
        ...

    def step_aside(self, text: str) -> None:
        """Leave the terminal to other code, which is about to write `text`."""
        ...


# What moves the cursor, erases or hides it: other code draws a display of its own. Colours (`m`) do not.
_DRAWS = re.compile(r"\x1b(?:\[[0-9;?]*[A-HJKSTfhlsu]|[78DM])")


class StreamRedirect(io.TextIOBase):
    """Replace a terminal stream, and pass on whole lines.

    The beginning of a line waits for its end. If a line is overwritten with carriage returns, as other libraries' bars
    do, only its last text is passed on. Text that moves the cursor is written as it is, after the owner has left.

    Args:
        stream: the terminal stream it replaces.
        owner: who draws on the terminal.
    """

    def __init__(self, stream: TextIO, owner: Owner) -> None:
        self.stream = stream
        self.owner = owner
        self._begun = ""
        self._is_released = False
        self._process = os.getpid()

    @property
    def encoding(self) -> Any:  # type: ignore[override]
        """The terminal's; the base class has none."""
        return getattr(self.stream, "encoding", None)

    @property
    def begun(self) -> str:
        """The visible text of the incomplete line."""
        return _overwritten(self._begun)

    def write(self, text: str) -> int:
        """Write text and pass on the lines that it completes; once released, write to the terminal."""
        if self._is_released or os.getpid() != self._process:  # a forked worker has no bars to redraw
            return self.stream.write(text)
        if self.owner.is_aside or _DRAWS.search(text):
            whole, self._begun = self._begun + text, ""
            self.owner.step_aside(whole)
            self.stream.write(whole)
            return len(text)
        *lines, rest = (self._begun + text).split("\n")
        self._begun = ""  # cleared first, because `write` may itself print
        for line in lines:
            self.owner.write(_overwritten(line))
        # What was overwritten is dropped: a bar may write to the same line for days.
        self._begun += _overwritten(rest) + "\r" * rest.endswith("\r")
        if self._begun:
            self.owner.show_begun()
        return len(text)

    def flush(self) -> None:
        """Flush the terminal's stream only; an incomplete line waits."""
        self.stream.flush()

    def release(self) -> None:
        """Write the incomplete line to the terminal, and from now on all text.

        Other code may keep a reference to this object as its stream.
        """
        self._is_released = True
        if self.begun.strip():
            write_text(self.stream, self.begun)
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
def without_library_bars() -> Iterator[None]:
    """Show no bars of transformers and huggingface_hub inside a block; HF_HUB_DISABLE_PROGRESS_BARS=0 shows them."""
    hub: Any = sys.modules.get("huggingface_hub.utils")
    library: Any = sys.modules.get("transformers.utils.logging")
    if hub is None or "HF_HUB_DISABLE_PROGRESS_BARS" in os.environ:
        yield
        return
    shows, library_shows = not hub.are_progress_bars_disabled(), library and library.is_progress_bar_enabled()
    (library.disable_progress_bar if library_shows else hub.disable_progress_bars)()
    try:
        yield
    finally:
        if library_shows:
            library.enable_progress_bar()
        (hub.enable_progress_bars if shows else hub.disable_progress_bars)()


@contextmanager
def redirect_output(owner: Owner) -> Iterator[list[StreamRedirect]]:
    """Send the lines of `sys.stdout`, `sys.stderr` and the log handlers on them to `owner`.

    Only streams that are terminals are redirected. Output to a file still goes there.
    """
    proxies = [
        (name, StreamRedirect(stream, owner))
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
        yield [proxy for _, proxy in proxies]
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
