"""Write log records to the console, marked with the rank, unless the application shows them itself."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from functools import cache
from typing import TextIO

from tr_log.streams import write_text

# Set on a record that was written: it may come to this handler from several loggers.
_SHOWN = "_tr_log_shown"


class RankHandler(logging.Handler):
    """Writes records to a stream, each line behind `[rank 1/4]` where there are several processes.

    The records also travel on to the root logger as always. Once the application has put a handler there
    (with `logging.basicConfig`, say), that one shows them, in its own format, and this one is silent; it is
    asked anew for each record, so the order of the two set-ups does not matter. Only a `stream` given on
    purpose is written to in any case, unless a handler of the root logger writes to that same stream.

    Attributes:
        rank: number of this process, from 0.
        world_size: number of processes.
        stream: where to write; None is whatever `sys.stderr` is at that moment.
        followers: names of loggers outside this project that share its handler and its level.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank = _number("RANK", 0)
        self.world_size = _number("WORLD_SIZE", 1)
        self.stream: TextIO | None = None
        self.followers: set[str] = set()
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text; with several processes every line of it carries the rank."""
        text = super().format(record).rstrip("\n")
        if self.world_size <= 1:
            return text
        prefix = f"[rank {self.rank}/{self.world_size}] "
        # A traceback of one rank is told from another's only if each of its lines is marked.
        return "\n".join(prefix + line for line in text.split("\n"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, unless it is shown elsewhere or was written already."""
        if getattr(record, _SHOWN, False) or self._is_shown_by_the_application(record):
            return
        setattr(record, _SHOWN, True)
        try:
            text = self.format(record)
        except Exception:  # the message and its arguments do not go together
            with contextlib.suppress(ValueError):  # stderr is closed
                self.handleError(record)
            return
        write_text(self.stream if self.stream is not None else sys.stderr, text + "\n")

    def _is_shown_by_the_application(self, record: logging.LogRecord) -> bool:
        handlers = [h for h in logging.getLogger().handlers if not isinstance(h, logging.NullHandler)]
        if self.stream is not None:
            handlers = [h for h in handlers if getattr(h, "stream", None) is self.stream]
        return bool(handlers) and _reaches_root(record.name)


@cache
def rank_handler() -> RankHandler:
    """Return the one handler of this process."""
    return RankHandler()


def _number(variable: str, default: int) -> int:
    # Launchers set these two, but the names are anybody's: what is no number is not meant for us.
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


def _reaches_root(name: str) -> bool:
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None and logger.parent is not None:
        if not logger.propagate:
            return False
        logger = logger.parent
    return True
