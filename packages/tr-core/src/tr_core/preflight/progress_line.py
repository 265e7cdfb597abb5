"""Say on stderr what a preflight is doing: one forward of a large model may take minutes."""

from __future__ import annotations

import os
import sys

from tr_log.terminal import write_line


def say(text: str) -> None:
    """Write one line to stderr at once, on the first of several processes."""
    if os.environ.get("RANK", "0") == "0":
        write_line(sys.stderr, f"preflight: {text}")
