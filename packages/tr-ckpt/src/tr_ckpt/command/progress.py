"""Show on a terminal how far the reading of files has come."""

from __future__ import annotations

import sys
import time

from tr_ckpt.command.table import size_text
from tr_ckpt.printable import printable

_BAR = 24
_PERIOD_S = 0.1


class Progress:
    """A line on stderr, drawn over itself; nothing where that is no terminal.

    Args:
        total_bytes: what is to be read.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._done = 0
        self._what = ""
        self._drawn = 0
        self._begun_s = self._last_s = time.monotonic()
        self._shown = sys.stderr.isatty()

    def begin(self, what: str) -> None:
        """Say what is read now."""
        self._what = printable(what)

    def advance(self, size_bytes: int) -> None:
        """Count what was read."""
        self._done += size_bytes
        now_s = time.monotonic()
        if self._shown and now_s - self._last_s >= _PERIOD_S:
            self._last_s = now_s
            self._draw(now_s - self._begun_s)

    def end(self) -> None:
        """Clear the line."""
        if self._drawn:
            print("\r" + " " * self._drawn, end="\r", file=sys.stderr, flush=True)
            self._drawn = 0

    def _draw(self, elapsed_s: float) -> None:
        share = min(1.0, self._done / max(self._total, 1))
        bar = ("#" * round(share * _BAR)).ljust(_BAR, ".")
        speed = size_text(self._done / max(elapsed_s, 1e-9))
        text = f"{share:4.0%} [{bar}] {size_text(self._total)}, {speed}/s, {self._what}"[:79]
        print("\r" + text.ljust(self._drawn), end="", file=sys.stderr, flush=True)
        self._drawn = len(text)
