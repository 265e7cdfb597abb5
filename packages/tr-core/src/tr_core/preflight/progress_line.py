"""Say on stderr what a preflight is doing: one forward of a large model may take minutes."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Write one line to stderr at once, on the first of several processes."""
    if os.environ.get("RANK", "0") == "0":
        print(f"preflight: {text}", file=sys.stderr, flush=True)
