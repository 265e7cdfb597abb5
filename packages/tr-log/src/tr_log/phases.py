"""Divide the time of a run among its phases: loading data, computing, evaluating, saving and so on."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

START, DATA, COMPUTE, EXCHANGE, EVALUATION, CHECKPOINT, PROFILE = (
    "start",
    "data",
    "compute",
    "exchange",
    "evaluation",
    "checkpoint",
    "profile",
)
PHASES = (START, DATA, COMPUTE, EXCHANGE, EVALUATION, CHECKPOINT, PROFILE)
"""Names of phases, in the order of reports."""
TRAINING = (DATA, COMPUTE, EXCHANGE)
"""Phases whose time the rates of a training loop count."""

_active = threading.local()


class PhaseClock:
    """Count the seconds of each phase. At any moment one phase is active, so the sum is the whole time.

    Args:
        phase: the first phase.

    Attributes:
        waited_s: seconds that `compute` counted since the last `take` and that were spent waiting for data. A training
            loop adds to it, because two switches would cost a step more.
        exchanged_s: returns the seconds since its last call that `compute` counted and that were spent waiting for an
            exchange of gradients; None where that is not known.
        knows_exchange: whether it was known at the last `take`; else gradients are exchanged within `compute`.
        rates: the latest figures of throughput, a new dict at each log of a training loop that measures them; a figure
            that is not known is absent. `samples_per_second`, `tokens_per_second` and `flops_per_second` are those of
            all processes together, `mfu` is the share of the devices' peak (0 to 1), and `memory_bytes` and
            `memory_peak_bytes` are those of the fullest device.
        due_s: `time.perf_counter()` from which a training loop calls `on_due`; infinite without one.
        on_due: what it calls, with the number of completed steps.
        on_event: called to write an event of the run: its name, and its values by keyword.
        on_close: called when the block of `phase_clock` ends.
        updates: updates since the last log that were not made, or made by values that are not finite: `skipped`,
            `overflowed`, `nonfinite`. A training loop writes it where it reads its device for a log.
        doing: what is under way, for displays: the name of a phase, or words that say it more exactly; empty while a
            training loop trains.
        on_doing: called with `doing` whenever it changes.
        batches: counts batches of evaluations, for who asks from another thread whether one goes on.
    """

    def __init__(self, phase: str = START) -> None:
        self.waited_s, self.due_s, self.batches = 0.0, math.inf, 0
        self.on_due: Callable[[int], None] = _nothing
        self.rates: dict[str, float] = {}
        self.exchanged_s: Callable[[], float | None] = _unknown
        self.knows_exchange = False
        self.on_event: Callable[..., None] = _nothing
        self.on_close: Callable[[], None] = _nothing
        self.updates: dict[str, int] = {}
        self.doing = ""
        self.on_doing: Callable[[str], None] = _nothing
        self._phase = phase
        self._since_s = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._taken: dict[str, float] = {}  # all that `take` returned
        self._trained_s = 0.0  # before the last `switch`

    @property
    def phase(self) -> str:
        """The active phase."""
        return self._phase

    @property
    def training_s(self) -> float:
        """Seconds so far of loading data, computing and exchange together: without evaluations, saves and the start."""
        running_s = time.perf_counter() - self._since_s if self._phase in TRAINING else 0.0
        return self._trained_s + running_s

    def switch(self, phase: str) -> str:
        """Make a phase the active one, and return the one before."""
        now, before = time.perf_counter(), self._phase
        self._seconds[before] = self._seconds.get(before, 0.0) + now - self._since_s
        if before in TRAINING:
            self._trained_s += now - self._since_s
        self._phase, self._since_s = phase, now
        return before

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call."""
        self._divide()
        seconds, self._seconds = self._seconds, {}
        self._taken = _sum(self._taken, seconds)
        return seconds

    def total(self) -> dict[str, float]:
        """Return the seconds of each phase since the clock began; what `take` returns next stays."""
        self._divide()
        return _sum(self._taken, self._seconds)

    def _divide(self) -> None:
        """Count until now, and what `compute` counted of other phases as these."""
        self.switch(self._phase)
        seconds, exchanged_s = self._seconds, self.exchanged_s()
        self.knows_exchange = exchanged_s is not None
        for name, waited_s in ((DATA, self.waited_s), (EXCHANGE, exchanged_s or 0.0)):
            waited_s = min(waited_s, seconds.get(COMPUTE, 0.0))
            if waited_s:
                seconds[COMPUTE] -= waited_s
                seconds[name] = seconds.get(name, 0.0) + waited_s
        self.waited_s = 0.0
        self._seconds = {name: value for name, value in seconds.items() if value > 0}


def _sum(one: dict[str, float], other: dict[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


def _nothing(*values: object, **named: object) -> None:
    """Do nothing."""


def _unknown() -> None:
    """Return None: a time that is not known."""


@contextmanager
def phase_clock() -> Iterator[PhaseClock]:
    """Make a new clock the active one of this thread inside a block; it begins with the phase `start`."""
    outer, clock = active_clock(), PhaseClock()
    _active.clock = clock
    try:
        yield clock
    finally:
        clock.on_close()
        _active.clock = outer


def active_clock() -> PhaseClock | None:
    """Return the active clock of this thread, None without one."""
    return getattr(_active, "clock", None)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the time of a block as a phase of the active clock; without a clock, do nothing."""
    clock = active_clock()
    if clock is None:
        yield
        return
    outer = clock.switch(name)
    try:
        with doing(name):
            yield
    finally:
        clock.switch(outer)


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Let displays say what a block does, as `compiling`; its time counts as before. Without a clock, do nothing."""
    clock = active_clock()
    if clock is None:
        yield
        return
    before, clock.doing = clock.doing, what
    clock.on_doing(what)
    try:
        yield
    finally:
        clock.doing = before
        clock.on_doing(before)
