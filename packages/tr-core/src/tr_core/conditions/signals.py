"""Note the signals that ask a process to stop; asked a second time, end it at once."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

from tr_log import get_logger, info_once

logger = get_logger(__name__)

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name))

# A launcher that gets a signal passes it on to processes that the system sent it to already: the same signal once more
# within this time is the same request. Ctrl-C is pressed by a person, who means it.
_REPEATED_WITHIN_S = 1.0


class Interrupted(SystemExit):
    """Ends `Trainer.train` after a signal; left alone it ends the process with code 128 + the signal's number.

    Attributes:
        signal: the signal.
        step: completed optimizer steps.
        checkpoint: folder of the checkpoint of that step.
    """

    def __init__(self, number: int, step: int, checkpoint: Path) -> None:
        super().__init__(number, step, checkpoint)
        self.signal, self.step, self.checkpoint = signal.Signals(number), step, checkpoint
        self.code = 128 + number

    def __str__(self) -> str:
        return f"{self.signal.name} at step {self.step}, saved as {self.checkpoint}"


class KeyboardInterrupted(Interrupted, KeyboardInterrupt):
    """Ends `Trainer.train` after Ctrl-C: also a `KeyboardInterrupt`, for those who catch that."""


def interrupted(number: int, step: int, checkpoint: Path) -> Interrupted:
    """Return the exception of a signal."""
    kind = KeyboardInterrupted if number == signal.SIGINT else Interrupted
    return kind(number, step, checkpoint)


class StopSignals:
    """Inside this block SIGTERM, SIGUSR1 and SIGINT set a flag; a second of them ends the process at once.

    Taken over are signals that nobody has a use for yet: one that is ignored stays so, as in a job that the shell put
    into the background, and one with a handler of the user's or of a library's keeps it. Outside of the main thread,
    where Python allows no handlers, none are set. Afterwards everything is as it was.

    A process forked in this block has the handlers too; there they act as the former ones would.

    Args:
        notify: called, once, by the handler of the first signal. It may come between any two operations of the main
            thread.

    Attributes:
        number: the first signal that came; 0 if none has.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        self._process = os.getpid()
        self._former: dict[int, Any] = {}
        self._came: list[int] = []
        self._first_s = math.inf

    @property
    def number(self) -> int:
        """The first signal that came; 0 if none has."""
        return self._came[0] if self._came else 0

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            info_once(
                logger,
                "train() is not called in the main thread, so signals act as ever: no checkpoint is written for them",
            )
            return self
        for number in SIGNALS:
            former = signal.getsignal(number)
            if former in (signal.SIG_DFL, signal.default_int_handler) and not _is_caught_outside_of_python(number):
                self._former[number] = signal.signal(number, self._handle)
            elif former != signal.SIG_IGN:
                info_once(
                    logger,
                    "%s has a handler already, which stays: no checkpoint is written for it unless that one asks for "
                    "it. signal.signal(signal.%s, signal.SIG_DFL) before train() takes it away",
                    *[signal.Signals(number).name] * 2,
                )
        return self

    def __exit__(self, *error: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        self._former = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            signal.signal(number, self._former.get(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
            return
        self._came.append(number)  # before anything is asked: another signal's handler may come in between
        now_s = time.monotonic()
        if len(self._came) == 1:
            self._first_s = now_s
            self._notify()
        elif number != self._came[0] or number == signal.SIGINT or now_s - self._first_s >= _REPEATED_WITHIN_S:
            _end_at_once(number)


def _end_at_once(number: int) -> None:
    """End this process and those that it started, without another line of Python."""
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():
            child.kill()
    name = signal.Signals(number).name
    with contextlib.suppress(OSError):
        os.write(2, f"\n{name}, the second signal: stopping at once; complete checkpoints stay as they are\n".encode())
    os._exit(128 + number)


def _is_caught_outside_of_python(number: int) -> bool:
    """Whether something that is not Python code has a handler, as `faulthandler.register` sets one; known on Linux."""
    try:
        status = Path("/proc/self/status").read_text("ascii")
    except (OSError, ValueError):
        return False
    caught = next((line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")), "0")
    is_caught = bool(int(caught, 16) >> (number - 1) & 1)
    return is_caught and signal.getsignal(number) == signal.SIG_DFL
