"""Report progress in plain lines, few of them, where no bar can be drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from tr_log import wording
from tr_log.pace import Pace
from tr_log.terminal import write_line

SHORTEST_INTERVAL_S = 10.0
GROWTH = 0.1


class TextBar:
    """Writes a line after 10 seconds and then ever more rarely, so that a day's work takes some eighty lines.

    The next line comes when both 10 seconds and a tenth of the time so far have passed. What is done within
    the first 10 seconds leaves no line at all.

    Args:
        stream: where to write.
        description: what is being done.
        total: how much there is; None where that is unknown.
        unit: what is counted, for the speed; `B` for bytes.
        clock: seconds that never run backwards.
    """

    def __init__(
        self,
        stream: TextIO | None,
        description: str,
        total: int | None = None,
        *,
        unit: str = "it",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.completed = 0
        self._stream = stream
        self._description = description
        self._unit = unit
        self._clock = clock
        self._pace = Pace(0, total, clock)
        self._next_s = clock() + SHORTEST_INTERVAL_S
        self._has_written = False

    def advance(self, amount: int = 1) -> None:
        """Count `amount` units as done."""
        self.completed += amount
        if self._clock() >= self._next_s:
            self._write()
            self._next_s = self._clock() + max(SHORTEST_INTERVAL_S, GROWTH * self._pace.elapsed_s)

    def close(self) -> None:
        """Write the final line, if there were lines before."""
        if self._has_written:
            self._write()
            self._has_written = False

    def _write(self) -> None:
        pieces = [f"{self._description} {wording.position(self.completed, self._pace.total, self._unit)}"]
        rate, eta_s = self._pace.mean_rate(self.completed), self._pace.eta_s(self.completed)
        if rate is not None:
            pieces.append(wording.speed(rate, self._unit))
        pieces.append(
            f"eta {wording.duration(eta_s)}" if eta_s is not None else f"after {wording.duration(self._pace.elapsed_s)}"
        )
        write_line(self._stream, "  ".join(pieces))
        self._has_written = True
