"""Tell a terminal, where bars can be redrawn, from a file, a pipe or a build server's log."""

from __future__ import annotations

import contextlib
import os
from typing import TextIO

from tr_log.streams import write_text


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
