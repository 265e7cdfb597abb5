"""Keep what others print on the terminal above the bars that are being drawn there."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tr_log.streams import write_text
from tr_log.terminal import is_terminal


class AboveBars(io.TextIOBase):
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
def printing_above(write_line: Callable[[str], None], owner: object) -> Iterator[None]:
    """Let `sys.stdout`, `sys.stderr` and the log handlers on them hand their lines to `write_line`.

    Only those of them that are terminals: what was led into a file goes on going there.
    """
    proxies = [
        (name, AboveBars(stream, write_line, owner))
        for name in ("stdout", "stderr")
        if (stream := getattr(sys, name)) is not None and is_terminal(stream) and not isinstance(stream, AboveBars)
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
    return stream.stream if isinstance(stream, AboveBars) else stream


def _overwritten(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]
