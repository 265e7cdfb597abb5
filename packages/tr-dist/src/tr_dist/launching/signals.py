"""Turn signals into an exception of the launcher, then wait for processes that were told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

# SIGUSR1 is what schedulers send some minutes before they end a job.
_PASSED_ON = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]
# A scheduler may tell the job and each process of it: the same signal within this time is the same request. Ctrl-C is
# pressed by a person, who means it.
_REPEATED_WITHIN_S = 1.0
_POLL_S = 0.05


@contextmanager
def former_handlers_afterwards() -> Iterator[None]:
    """Have signals end this process at once until `raise_signals` is called; afterwards all is as it was."""
    former = {number: signal.getsignal(number) for number in _PASSED_ON}
    # Python's own handler waits until torch has met the other machines, which may be never.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def raise_signals() -> None:
    """Have the signals that ask a process to stop raise torch's `SignalException`, as torch's own handlers do."""

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))

    for number in _PASSED_ON:
        signal.signal(number, raise_it)


def stop(processes: Collection[subprocess.Popen[Any]], number: signal.Signals, *, within_s: float) -> str | None:
    """Send a signal once to each process that runs, and wait for all; kill those that do not end.

    A second signal to this process, or the end of `within_s` seconds, kills.

    Args:
        processes: the processes, each of which leads a session of its own.
        number: the signal.
        within_s: seconds to wait.

    Returns:
        Why processes were killed, or None if all ended.
    """
    if not processes:
        return None
    begun_s, repeated = time.monotonic(), []

    def note(again: int, frame: FrameType | None) -> None:
        if again != number or again == signal.SIGINT or time.monotonic() - begun_s > _REPEATED_WITHIN_S:
            repeated.append(again)

    former = {each: signal.signal(each, note) for each in _PASSED_ON}
    try:
        for process in processes:
            if process.poll() is None:
                # To the rank alone: what it started is its own to stop, when it has saved.
                os.kill(process.pid, number)
        while any(process.poll() is None for process in processes):
            if repeated:
                return _kill(processes, f"a second signal, {signal.Signals(repeated[0]).name}")
            if time.monotonic() - begun_s > within_s:
                return _kill(processes, f"{within_s:g} s (--stop_timeout) after {number.name}")
            time.sleep(_POLL_S)
        return None
    finally:
        for each, handler in former.items():
            signal.signal(each, handler)


def _kill(processes: Collection[subprocess.Popen[Any]], reason: str) -> str:
    running = [process for process in processes if process.poll() is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    return reason
