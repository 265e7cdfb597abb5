"""Measure how fast something advances and when it will be done."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Speed since the last look, and the time left by the speed since the start.

    The two differ on purpose: the recent speed shows at once that something has become slow, while the time
    left has to count the evaluations and saves that will come again.

    Args:
        completed: what was done before the measurement starts, as after a resume.
        total: how much there is; None or less than 1 where that is unknown.
        clock: seconds that never run backwards.
    """

    def __init__(self, completed: int, total: int | None, clock: Callable[[], float] = time.perf_counter) -> None:
        self.total = total if total is not None and total > 0 else None
        self._clock = clock
        self._first = self._last = completed
        self._started_s = self._last_s = clock()
        self._excluded_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started_s

    def exclude(self, seconds: float) -> None:
        """Leave time that was spent on something else, such as an evaluation, out of the next `rate`."""
        self._excluded_s += seconds

    def rate(self, completed: int) -> float | None:
        """Return units per second since the last call, or None if nothing was done since."""
        now = self._clock()
        done = completed - self._last
        seconds = now - self._last_s - self._excluded_s
        self._last, self._last_s, self._excluded_s = completed, now, 0.0
        return done / seconds if done > 0 and seconds > 0 else None

    def mean_rate(self, completed: int) -> float | None:
        """Return units per second since the start, or None if nothing was done yet."""
        done, seconds = completed - self._first, self.elapsed_s
        return done / seconds if done > 0 and seconds > 0 else None

    def eta_s(self, completed: int) -> float | None:
        """Return the seconds left, or None if there is nothing to judge by or nothing left."""
        rate = self.mean_rate(completed)
        if rate is None or self.total is None or completed >= self.total:
            return None
        return (self.total - completed) / rate
