"""Wait for pushes at the end of a run: say for what, and for no longer than they can be expected to take."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tr_ckpt.hub.push_queue import PushQueue

logger = logging.getLogger(__name__)

# The longest wait: for what a Hub does however little is pushed, and for the bytes at the rate of a slow line.
BASE_S = 600.0
SLOWEST_BYTES_PER_S = 2e6

# How often to say what is waited for.
TELL_EVERY_S = 60.0

_LOOK_EVERY_S = 0.2
_REPEATED_WITHIN_S = 1.0


def limit_s(left_bytes: int) -> float:
    """Return how long to wait at most for pushes of so many bytes."""
    return BASE_S + left_bytes / SLOWEST_BYTES_PER_S


def wait_for(queue: PushQueue, url: str, caught: list[int], most_s: float | None = None) -> bool:
    """Return True once all pushes are done; give up those that are not when it gets too long, and return False.

    Args:
        queue: of the pushes.
        url: where they go, for messages.
        caught: what `interrupts` collects; the first one ends the wait at once.
        most_s: the longest wait; None is that of `limit_s`.
    """
    pending = queue.pending()
    if not pending:
        return True
    most_s = limit_s(sum(push.bytes for push in pending)) if most_s is None else most_s
    end = time.monotonic() + most_s
    logger.info("waiting for %s; for %s at most, or until Ctrl-C", _said(queue, url), minutes(most_s))
    told = time.monotonic()
    while not queue.wait(min(_LOOK_EVERY_S, max(0.0, end - time.monotonic()))):
        now = time.monotonic()
        if caught or now >= end:
            queue.give_up("the wait was interrupted" if caught else f"it was not done after {minutes(most_s)}")
            return False
        if now - told >= TELL_EVERY_S:
            told = now
            logger.info("still waiting for %s; for %s more at most", _said(queue, url), minutes(end - now))
    return True


@contextmanager
def interrupts(*, after_signal: bool = False) -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM meanwhile, where they are not ignored; then act on the first.

    It is sent again, to whoever handled it before. If that does not end the process, `KeyboardInterrupt` is raised, or
    `SystemExit` with code 128 + the signal's number.

    Args:
        after_signal: whether a signal has just ended the run: the same one may come once more at once, from a launcher
            that passes on what the system sent to all processes, and is no further request. Ctrl-C always is.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only that one can
        yield caught
        return
    begun = time.monotonic()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT or not after_signal or time.monotonic() - begun >= _REPEATED_WITHIN_S:
            caught.append(number)

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # None was set by something other than Python, and cannot be put back from here.
    taken = {number: handler for number, handler in former.items() if handler not in (None, signal.SIG_IGN)}
    for number in taken:
        signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in taken.items():
            signal.signal(number, handler)
        if caught:
            signal.raise_signal(caught[0])
            raise KeyboardInterrupt if caught[0] == signal.SIGINT else SystemExit(128 + caught[0])


def minutes(seconds: float) -> str:
    """Return a time as messages give it."""
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _said(queue: PushQueue, url: str) -> str:
    pending = queue.pending()
    left = sum(push.bytes for push in pending)
    names = ", ".join(repr(push.label) for push in pending)
    return f"{len(pending)} {'push' if len(pending) == 1 else 'pushes'} to {url}, {_size(left)}: {names}"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
