"""Show the progress of any long work: a bar on a terminal, a few lines elsewhere.

`progress` wraps an iterable, `progress_bar` counts work that is no iteration. `open_bar` chooses the display for a
stream. `RateMeter` measures the speed and estimates the time left.
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


LONGEST_BAR = 40
SHORTEST_BAR = 10
SPEED_WINDOW_DRAWS = 50


class TerminalBar:
    """One line `training ━━━━━━━─────── 120/500  24%  3.2 it/s  eta 2:03  loss 0.4321`.

    On a narrow terminal it drops what stands last, and the bar itself before the numbers.

    Args:
        screen: where it is shown, from now until `close`.
        description: what is being done.
        total: how much there is; None where that is unknown.
        completed: what was done before.
        unit: what is counted, for the speed; `B` for bytes.
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
        """Show that `completed` units are done; drawn now only if the last drawing was long enough ago."""
        self.completed = completed
        if self._screen.is_due():
            self._recent.append((time.perf_counter(), completed))
            self._screen.draw()

    def write(self, line: str) -> None:
        """Write a line above the bars."""
        self._screen.write(line)

    def close(self) -> None:
        """Show it no longer."""
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
        # It only ever shrinks on a terminal of one width, or it would tremble with every digit of
        # the numbers.
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
    """What shows progress, however it does."""

    def advance(self, amount: int = 1) -> None:
        """Count `amount` units as done."""
        ...

    def close(self) -> None:
        """Show it no longer."""
        ...


def open_bar(stream: TextIO | None, description: str, total: int | None, *, unit: str = "it") -> Bar:
    """Return what fits `stream`, None being `sys.stderr`: a bar on a terminal, lines elsewhere."""
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
    """Iterate over `iterable` and show how far it is.

    On a terminal a bar is drawn and taken away at the end. Elsewhere a line is written after 10 seconds and
    then ever more rarely; what takes less leaves none.

    Args:
        iterable: what to go through.
        total: how many items there are; None asks `len(iterable)`, where there is such a thing.
        description: what is being done.
        stream: where to show it; None is `sys.stderr`.
        disable: show nothing, as on all processes but one.
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
    """Give an object whose `advance(amount)` counts work as done, for work that is no iteration.

    Args:
        description: what is being done.
        total: how much there is; None where that is unknown.
        unit: what is counted, for the speed; `B` for bytes.
        stream: where to show it; None is `sys.stderr`.
    """
    bar = open_bar(stream, description, total, unit=unit)
    try:
        yield bar
    finally:
        bar.close()


def length(iterable: object) -> int | None:
    """Return the number of items, or None where it cannot be known beforehand."""
    if not isinstance(iterable, Sized):
        return None
    try:
        return len(iterable)
    except TypeError:  # a loader over an endless stream has a length only by name
        return None
