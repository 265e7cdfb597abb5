"""Strike a job, once, when one of its processes comes to a place: raise, end, be slow, or send a signal."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

WORDS = "the reason of this attack"
STOPPED_S = 1.0  # that a process is stopped before it is let go on
_LINGER_S = 0.4  # that the striker stays in its place, for a signal to another to arrive in the meantime


class UnprintableError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("an exception without a text")


class UnpicklableError(Exception):
    """Cannot be sent to another process."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class OddError(BaseException):
    """No Exception, so that what catches those lets it pass."""


def _recurse(depth: int) -> int:
    return 1 + _recurse(depth + 1)


RAISED: dict[str, Callable[[], BaseException]] = {
    "Exception": lambda: ArithmeticError(WORDS),
    "BaseException": lambda: OddError(WORDS),
    "SystemExit0": lambda: SystemExit(0),
    "SystemExit3": lambda: SystemExit(3),
    "KeyboardInterrupt": lambda: KeyboardInterrupt(WORDS),
    "MemoryError": lambda: MemoryError(WORDS),
    "Unprintable": UnprintableError,
    "Unpicklable": lambda: UnpicklableError(WORDS),
    "StopIteration": lambda: StopIteration(WORDS),
    "OSError": lambda: OSError(5, WORDS),
    "EOFError": lambda: EOFError(WORDS),
    "TimeoutError": lambda: TimeoutError(WORDS),
}


@dataclass(frozen=True)
class Strike:
    """What happens where, and to whom.

    Attributes:
        place: name of a place.
        how: `raise:NAME` of `RAISED`, `recurse`, `exit:CODE`, `segfault`, `slow:SECONDS`, `signal:NAME`, `twice:NAME`,
            with 1.3 seconds between, or `storm:NAME,NAME` many times in turn.
        times: when the place is reached for this time.
        rank: the rank whose process comes to the place.
        target: of a signal: `me`, `rank0`, `rank1`, `parent` of the process, `worker`, `group`.
        delay_s: seconds that the rank waits in the place before it strikes.
    """

    place: str
    how: str
    times: int = 1
    rank: int = 0
    target: str = "me"
    delay_s: float = 0.0

    def words(self) -> str:
        """Return it as the program's argument."""
        return f"{self.place}/{self.how}/{self.times}/{self.rank}/{self.target}/{self.delay_s}"

    @classmethod
    def read(cls, words: str) -> Strike:
        """Return what `words` gave."""
        place, how, times, rank, target, delay_s = words.split("/")
        return cls(place, how, int(times), int(rank), target, float(delay_s))

    def __str__(self) -> str:
        to = f" to {self.target}" if self.how.startswith(("signal", "twice", "storm")) else ""
        return f"rank {self.rank}: {self.how}{to} at {self.place} {self.times}"


class Striker:
    """Counts the places that this process reaches, and strikes at one.

    Args:
        out: folder of the job; `struck` in it notes when, so that a job is struck once, in whatever start.
        rank: number of this process.
        strike: what is to happen; None leaves the run alone.
    """

    def __init__(self, out: Path, rank: int, strike: Strike | None) -> None:
        self.out, self.rank, self.strike = out, rank, strike
        self.workers: Callable[[], list[int]] = list
        self._reached: Counter[str] = Counter()
        out.mkdir(parents=True, exist_ok=True)
        (out / f"process-{rank}").write_text(str(os.getpid()))

    def reach(self, place: str) -> None:
        """Strike if this is where."""
        strike = self.strike
        if strike is None or place != strike.place or self.rank != strike.rank:
            return
        self._reached[place] += 1
        if self._reached[place] < strike.times or not self._is_first():
            return
        time.sleep(strike.delay_s)
        (self.out / "struck").write_text(repr(time.time()))
        kind, _, what = strike.how.partition(":")
        getattr(self, f"_{kind}")(what)

    def _is_first(self) -> bool:
        try:
            os.close(os.open(self.out / "strikes", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def _raise(self, what: str) -> None:
        raise RAISED[what]()

    def _recurse(self, what: str) -> None:
        _recurse(0)

    def _exit(self, what: str) -> None:
        os._exit(int(what))

    def _segfault(self, what: str) -> None:
        ctypes.string_at(0)

    def _slow(self, what: str) -> None:
        time.sleep(float(what))

    def _signal(self, what: str) -> None:
        for target in self._targets():
            self._send(target, what)
        self._linger()

    def _twice(self, what: str) -> None:
        for name in what.split(","):
            for target in self._targets():
                self._send(target, name)
            time.sleep(1.3)

    def _storm(self, what: str) -> None:
        for _ in range(20):
            for name in what.split(","):
                for target in self._targets():
                    self._send(target, name)
            time.sleep(0.01)
        self._linger()

    def _linger(self) -> None:
        if self.strike is not None and self.strike.target not in ("me", "group"):
            time.sleep(_LINGER_S)

    def _targets(self) -> list[int]:
        target = self.strike.target if self.strike is not None else "me"
        if target.startswith("rank"):
            return [int((self.out / f"process-{target[4:]}").read_text())]
        if target == "parent":
            return [os.getppid()]
        if target == "group":
            return [-os.getpgid(0)]
        return self.workers() if target == "worker" else [os.getpid()]

    @staticmethod
    def _send(target: int, name: str) -> None:
        number = getattr(signal, f"SIG{name}")
        if number == signal.SIGSTOP:
            again = f"sleep {STOPPED_S}; kill -s CONT -- {target}"
            # With no variables, so that nobody takes it for a process of the job; in a session of its own.
            subprocess.Popen(["/bin/sh", "-c", again], env={}, start_new_session=True)
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, number)
        sys.stdout.flush()
