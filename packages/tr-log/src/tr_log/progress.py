"""Show the progress of any long work: a bar on a terminal, a few lines elsewhere.

`progress` wraps an iterable, `progress_bar` counts other work. `open_bar` chooses the display for a stream.
`RateMeter` measures the speed and estimates the time left.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO, TypeVar

from tr_log import formatting
from tr_log.terminal import Screen, is_terminal, write_line

if TYPE_CHECKING:
    from rich.text import Text


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


LONGEST_BAR = 40
SHORTEST_BAR = 10
SPEED_WINDOW_DRAWS = 50


class TerminalBar:
    """One line `training ━━━━━━━─────── 120/500  24%  3.2 it/s  eta 2:03  loss 0.4321`.

    On a narrow terminal it drops the last parts first, and the bar itself before the numbers.

    Args:
        screen: the screen that shows it, until `close`.
        description: name of the work.
        total: number of units; None if it is unknown.
        completed: units that were done before.
        unit: name of a unit, for the speed; `B` for bytes.
    """

    def __init__(
        self,
        screen: Screen,
        description: str,
        total: int | None = None,
        *,
        completed: int = 0,
        unit: str = "it",
    ) -> None:
        self.completed = completed
        self.note: list[str] = []
        self._screen = screen
        self._description = description
        self._unit = unit
        self._pace = RateMeter(completed, total)
        self._width, self._longest = 0, LONGEST_BAR
        self._recent = deque([(time.perf_counter(), completed)], maxlen=SPEED_WINDOW_DRAWS)
        screen.add(self)

    def advance(self, amount: int = 1) -> None:
        """Count `amount` units as done."""
        self.move_to(self.completed + amount)

    def move_to(self, completed: int) -> None:
        """Set the number of units done; draw only if the last drawing was long enough ago."""
        self.completed = completed
        if self._screen.is_due():
            self._recent.append((time.perf_counter(), completed))
            self._screen.draw()

    def write(self, line: str) -> None:
        """Write a line above the bars."""
        self._screen.write(line)

    def close(self) -> None:
        """Remove the bar from the screen."""
        self._screen.remove(self)

    def draw(self, width: int) -> Text:
        """Return the line, at most `width` characters wide."""
        from rich.text import Text

        pieces = self._pieces()
        room = width - len(self._description) - 2
        while len(pieces) > 1 and room - _joined_length(pieces) < SHORTEST_BAR:
            pieces.pop()
        line = Text(f"{self._description} ", no_wrap=True)
        bar = self._bar_length(width, room - _joined_length(pieces))
        if self._pace.total is not None and bar >= SHORTEST_BAR:
            filled = min(bar, bar * self.completed // self._pace.total)
            done, open_ = self._screen.bar_characters
            line.append(done * filled, style="green").append(open_ * (bar - filled), style="bright_black").append(" ")
        line.append("  ".join(pieces))
        line.truncate(width)
        return line

    def _bar_length(self, width: int, room: int) -> int:
        # While the terminal keeps its width the bar only shrinks. Otherwise it would change with every digit.
        if width != self._width:
            self._width, self._longest = width, LONGEST_BAR
        self._longest = min(self._longest, room)
        return self._longest

    def _pieces(self) -> list[str]:
        total, pieces = self._pace.total, []
        if total is None:
            pieces.append(formatting.position(self.completed, None, self._unit))
        else:
            position = formatting.position(self.completed, total, self._unit)
            pieces += [position.partition(" (")[0], f"{100 * self.completed // total}%"]
        rate, eta_s = self._rate(), self._pace.eta_s(self.completed)
        if rate:
            pieces.append(formatting.speed(rate, self._unit))
        if eta_s is not None:
            pieces.append(f"eta {formatting.duration(eta_s)}")
        return pieces + self.note

    def _rate(self) -> float | None:
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        return (last - first) / (last_s - first_s) if last > first else None


def _joined_length(pieces: list[str]) -> int:
    return len("  ".join(pieces))


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


def open_bar(stream: TextIO | None, description: str, total: int | None, *, unit: str = "it") -> Bar:
    """Return a bar for a terminal and lines for any other `stream`; None is `sys.stderr`."""
    where = stream if stream is not None else sys.stderr
    if where is not None and is_terminal(where):
        return TerminalBar(Screen.on(where), description, total, unit=unit)
    return TextBar(where, description, total, unit=unit)


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
    """Yield a bar whose `advance(amount)` counts units as done, for work that is no iteration.

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
