"""Show progress as a bar on a terminal."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from tr_log import wording
from tr_log.pace import Pace
from tr_log.screen import Screen

if TYPE_CHECKING:
    from rich.text import Text

LONGEST_BAR = 40
SHORTEST_BAR = 10
DRAWINGS_FOR_THE_SPEED = 50


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
        self._pace = Pace(completed, total)
        self._width, self._longest = 0, LONGEST_BAR
        self._recent = deque([(time.perf_counter(), completed)], maxlen=DRAWINGS_FOR_THE_SPEED)
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
        while len(pieces) > 1 and room - _length(pieces) < SHORTEST_BAR:
            pieces.pop()
        line = Text(f"{self._description} ", no_wrap=True)
        bar = self._bar_length(width, room - _length(pieces))
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
            pieces.append(wording.position(self.completed, None, self._unit))
        else:
            position = wording.position(self.completed, total, self._unit)
            pieces += [position.partition(" (")[0], f"{100 * self.completed // total}%"]
        rate, eta_s = self._rate(), self._pace.eta_s(self.completed)
        if rate:
            pieces.append(wording.speed(rate, self._unit))
        if eta_s is not None:
            pieces.append(f"eta {wording.duration(eta_s)}")
        return pieces + self.note

    def _rate(self) -> float | None:
        (first_s, first), (last_s, last) = self._recent[0], self._recent[-1]
        return (last - first) / (last_s - first_s) if last > first else None


def _length(pieces: list[str]) -> int:
    return len("  ".join(pieces))
