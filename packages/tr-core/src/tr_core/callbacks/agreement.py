"""Have all ranks log, evaluate, save and stop at the same step, also where the callbacks of one alone ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from tr_core.protocols import Collectives
from tr_core.state import TrainerControl

FLAGS = tuple(flag.name for flag in fields(TrainerControl))


class StepAgreement:
    """What ranks tell each other between two steps, in one exchange: a number, and the flags their callbacks set.

    A rank with no flag set does not wait: while the exchange travels it goes on with the next step, and hears at the
    end of that what was said. A rank with a flag waits. So where every rank has one, as when a log is due by the
    count of steps, all hear at once and do what any of them asks for. Where some rank has none, it has gone on; the
    others then leave their flags as if they were not set, and all do it together one step later.

    Every rank calls the same methods in the same order.

    Args:
        collectives: how ranks exchange it.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self._read: Callable[[], list[int]] = lambda: [0, 0, *(0 for _ in FLAGS)]  # nothing was told yet
        self._put_off: set[str] = set()

    def on_flags(self, control: TrainerControl, number: int, *, waits: bool = False) -> int:
        """Tell a number and the flags, and change these to what all ranks do now.

        Args:
            control: the flags of this rank.
            number: the number of this rank.
            waits: have all ranks wait, so that what any of them asks for is done now.

        Returns:
            The largest number that was told the last time.
        """
        before = self.last_number()
        wanted = [getattr(control, flag) or flag in self._put_off for flag in FLAGS]
        self._put_off = set()
        waits = waits or any(wanted)
        self._tell(number, wanted, goes_on=not waits)
        if waits:
            _, some_went_on, *flags = self._read()
            for name, is_wanted in zip(FLAGS, flags, strict=True):
                setattr(control, name, bool(is_wanted and not some_went_on))
        return before

    def on_number(self, number: int) -> int:
        """Tell a number alone, and return the largest that was told the last time."""
        before = self.last_number()
        self._tell(number, [False for _ in FLAGS], goes_on=True)
        return before

    def last_number(self) -> int:
        """Return the largest number that was told the last time, 0 if none was."""
        number, some_went_on, *flags = self._read()
        if some_went_on:
            self._put_off |= {name for name, is_wanted in zip(FLAGS, flags, strict=True) if is_wanted}
        return number

    def _tell(self, number: int, wanted: list[bool], *, goes_on: bool) -> None:
        self._read = self._collectives.agree([number, int(goes_on), *map(int, wanted)])
