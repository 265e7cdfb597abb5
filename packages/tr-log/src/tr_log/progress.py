"""Show the progress of any long work: a bar on a terminal or in a notebook, a few lines elsewhere.

`progress` wraps an iterable, `progress_bar` counts other work. `open_display` chooses the display for a stream.
`RateMeter` measures the speed and estimates the time left.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import Protocol, TextIO, TypeVar

from tr_log import formatting
from tr_log.layout import Display, Figure, Row
from tr_log.terminal import is_terminal, write_line


class RateMeter:
    """Measure the speed since the last call, and estimate the time left from the speed since the start.

    The two differ on purpose. The recent speed shows at once when something becomes slow. The time left also counts
    future evaluations and saves.

    Args:
        completed: units that were done before the measurement starts, as after a resume.
        total: number of units; None or less than 1 if it is unknown.
        clock: a monotonic clock, in seconds.
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
        """Exclude time spent on something else, such as an evaluation, from the next `rate`."""
        self._excluded_s += seconds

    def rate(self, completed: int) -> float | None:
        """Return units per second since the last call, or None if no unit was done since."""
        now = self._clock()
        done = completed - self._last
        seconds = now - self._last_s - self._excluded_s
        self._last, self._last_s, self._excluded_s = completed, now, 0.0
        return done / seconds if done > 0 and seconds > 0 else None

    def mean_rate(self, completed: int) -> float | None:
        """Return units per second since the start, or None if no unit was done yet."""
        done, seconds = completed - self._first, self.elapsed_s
        return done / seconds if done > 0 and seconds > 0 else None

    def eta_s(self, completed: int) -> float | None:
        """Return the seconds left, or None if they are unknown or all units are done."""
        rate = self.mean_rate(completed)
        if rate is None or self.total is None or completed >= self.total:
            return None
        return (self.total - completed) / rate


SPEED_WINDOW_DRAWS = 25


class DrawnBar:
    """A bar: `training ━━━━━━━━━━━━━━━━  120/500   24%  3.20 it/s  eta 2:03`, with figures below.

    Args:
        display: where it is drawn, until `close`.
        name: name of the work.
        total: number of units; None if it is unknown.
        completed: units that were done before.
        unit: name of a unit, for the speed; `B` for bytes.

    Attributes:
        name: the same.
        completed: units done.
        figures: returns the numbers below the bar.
    """

    def __init__(
        self, display: Display, name: str, total: int | None = None, *, completed: int = 0, unit: str = "it"
    ) -> None:
        self.name, self.completed = name, completed
        self.figures: Callable[[], Sequence[Figure]] = tuple
        self._display = display
        self._unit = unit
        self._pace = RateMeter(completed, total, display.clock)
        self._recent = deque([(display.clock(), completed)], maxlen=SPEED_WINDOW_DRAWS)
        display.add(self)

    def advance(self, amount: int = 1) -> None:
        """Count `amount` units as done."""
        self.move_to(self.completed + amount)

    def move_to(self, completed: int) -> None:
        """Set the number of units done; draw only if the last drawing was long enough ago."""
        self.completed = completed
        if self._display.is_due():
            self._recent.append((self._display.clock(), completed))
            self._display.draw()

    def rename(self, name: str) -> None:
        """Change the name, and draw."""
        if name != self.name:
            self.name = name
            self._display.draw()

    def close(self) -> None:
        """Remove the bar."""
        self._display.remove(self)

    def row(self) -> Row:
        """Return what the bar shows now."""
        total, done, cells = self._pace.total, self.completed, ["", "", "", ""]
        cells[0] = formatting.position(done, total, self._unit).partition(" (")[0]
        if total is not None:
            cells[0] = cells[0].rjust(2 * len(str(total)) + 1 if self._unit != "B" else 0)
            cells[1] = f"{100 * done // total:3}%"
        if (eta_s := self._pace.eta_s(done)) is not None:
            cells[2] = f"eta {formatting.duration(eta_s)}"
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        if last > first and last_s > first_s:
            cells[3] = formatting.speed((last - first) / (last_s - first_s), self._unit)
        share = None if total is None else min(done / total, 1.0)
        return Row(self.name, share, (cells[0], cells[1], cells[2], cells[3]), self.figures())


SHORTEST_INTERVAL_S = 10.0
GROWTH = 0.1


class TextBar:
    """Write a line after 10 seconds and then less and less often; a day's work takes about eighty lines.

    The next line is due when both 10 seconds and a tenth of the time so far have passed. Work of less than 10 seconds
    writes no line.

    Args:
        stream: where to write.
        description: name of the work.
        total: number of units; None if it is unknown.
        unit: name of a unit, for the speed; `B` for bytes.
        clock: a monotonic clock, in seconds.
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
        self._pace = RateMeter(0, total, clock)
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
        pieces = [f"{self._description} {formatting.position(self.completed, self._pace.total, self._unit)}"]
        rate, eta_s = self._pace.mean_rate(self.completed), self._pace.eta_s(self.completed)
        if rate is not None:
            pieces.append(formatting.speed(rate, self._unit))
        pieces.append(
            f"eta {formatting.duration(eta_s)}"
            if eta_s is not None
            else f"after {formatting.duration(self._pace.elapsed_s)}"
        )
        write_line(self._stream, "  ".join(pieces))
        self._has_written = True


class Bar(Protocol):
    """A progress display of any kind."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` units as done."""
        ...

    def close(self) -> None:
        """End the display."""
        ...


def open_display(stream: TextIO | None) -> Display | None:
    """Return where bars for `stream` are drawn, a terminal or the output of a notebook's cell; None where not.

    Args:
        stream: where to show them; None is the notebook, if this is one, else `sys.stderr`.
    """
    # Imported here: a job on a cluster draws on neither.
    if stream is None and "IPython" in sys.modules:
        from tr_log.notebook import NotebookOutput, in_notebook

        if in_notebook():
            return NotebookOutput.current()
    where = stream if stream is not None else sys.stderr
    if where is None or not is_terminal(where):
        return None
    from tr_log.screen import Screen

    return Screen.on(where)


def open_bar(stream: TextIO | None, description: str, total: int | None, *, unit: str = "it") -> Bar:
    """Return a bar for a terminal or a notebook, and lines for any other `stream`; None is `sys.stderr`."""
    display = open_display(stream)
    if display is not None:
        return DrawnBar(display, description, total, unit=unit)
    return TextBar(stream if stream is not None else sys.stderr, description, total, unit=unit)


T = TypeVar("T")


def progress(
    iterable: Iterable[T],
    total: int | None = None,
    description: str = "working",
    *,
    stream: TextIO | None = None,
    disable: bool = False,
) -> Iterator[T]:
    """Iterate over `iterable` and show the position.

    On a terminal it draws a bar and removes it at the end. Elsewhere it writes a line after 10 seconds and then less
    and less often; shorter work writes none.

    Args:
        iterable: the items.
        total: number of items; None uses `len(iterable)`, if it has one.
        description: name of the work.
        stream: where to show it; None is `sys.stderr`.
        disable: show nothing, for example on all processes but one.
    """
    if disable:
        yield from iterable
        return
    with progress_bar(description, length(iterable) if total is None else total, stream=stream) as bar:
        for item in iterable:
            yield item
            bar.advance()


@contextmanager
def progress_bar(
    description: str, total: int | None = None, *, unit: str = "it", stream: TextIO | None = None
) -> Iterator[Bar]:
    """Yield a bar whose `advance(amount)` counts units as done, for work that is not an iteration.

    Args:
        description: name of the work.
        total: number of units; None if it is unknown.
        unit: name of a unit, for the speed; `B` for bytes.
        stream: where to show it; None is `sys.stderr`.
    """
    bar = open_bar(stream, description, total, unit=unit)
    try:
        yield bar
    finally:
        bar.close()


def length(iterable: object) -> int | None:
    """Return the number of items, or None if it is unknown."""
    if not isinstance(iterable, Sized):
        return None
    try:
        return len(iterable)
    except TypeError:  # a loader over an endless stream has `__len__`, but no length
        return None
