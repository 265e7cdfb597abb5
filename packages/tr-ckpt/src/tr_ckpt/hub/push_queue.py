"""Push in the background, one after the other, record what failed, and wait for the rest at the end of a run.

The wait logs what it waits for. It lasts no longer than the pushes can be expected to take, and ends at a signal.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

from tr_ckpt import background
from tr_ckpt.errors import PushError

logger = logging.getLogger(__name__)


def _do_nothing() -> None:
    pass


@dataclass(eq=False)
class Push:
    """Something to do in the background.

    Attributes:
        label: what messages call it.
        work: does it; its result is the future's.
        bytes: how much there is to upload, at most.
        clean_up: called once it is done, failed or given up.
        is_awaited: whether the end of the process waits for it.
        future: of the result.
        is_settled: whether somebody saw to the future.
    """

    label: str
    work: Callable[[], Any]
    bytes: int = 0
    clean_up: Callable[[], None] = _do_nothing
    is_awaited: bool = True
    future: Future[Any] = field(default_factory=Future)
    is_settled: bool = False


_queues: weakref.WeakSet[PushQueue] = weakref.WeakSet()


class PushQueue:
    """One background thread that does pushes in the order they come, while there are any.

    The thread ends with the process, whatever it is doing: a request to a Hub that hangs cannot be ended otherwise.
    The end of the process waits for it for as long as `exit_limit_s` says.

    Args:
        most_waiting: how many may wait. One more has the one that waits longest fail: each holds a copy on the disk.
        exit_limit_s: gives the longest time to wait at the process' end, of the bytes that are left.

    Attributes:
        failures: for each push that failed and was awaited, its label and what its exception said.
    """

    def __init__(self, most_waiting: int, exit_limit_s: Callable[[int], float]) -> None:
        self.failures: list[tuple[str, str]] = []
        self._most_waiting = most_waiting
        self._exit_limit_s = exit_limit_s
        self._changed = threading.Condition()
        self._waiting: deque[Push] = deque()
        self._running: Push | None = None
        self._process = os.getpid()
        _queues.add(self)
        _wait_at_exit()

    def submit(self, push: Push) -> Future[Any]:
        """Do `push` after those given before. If it fails, that is logged at once and noted in `failures`."""
        surplus = None
        with self._changed:
            if len(self._waiting) >= self._most_waiting:
                surplus = self._waiting.popleft()
            self._waiting.append(push)
            if self._running is None:
                self._running = self._waiting.popleft()
                threading.Thread(target=self._work, name="hub-push", daemon=True).start()
        if surplus is not None:
            self._fail(surplus, PushError(f"{surplus.label!r} was not pushed: {self._most_waiting} newer ones wait"))
        return push.future

    def pending(self) -> list[Push]:
        """Return what runs and what waits, in order."""
        with self._changed:
            return ([] if self._running is None else [self._running]) + list(self._waiting)

    def is_busy(self) -> bool:
        """Whether a push waits or runs."""
        return bool(self.pending())

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether all is done, at the latest after `seconds`; None waits for as long as it takes."""
        with self._changed:
            return self._changed.wait_for(lambda: self._running is None, seconds)

    def give_up(self, why: str) -> None:
        """Have everything that is not done fail; what runs is left to itself, and its result to nobody."""
        with self._changed:
            left = ([] if self._running is None else [self._running]) + list(self._waiting)
            self._running = None
            self._waiting.clear()
            self._changed.notify_all()
        for push in left:
            self._fail(push, PushError(f"{push.label!r} was not pushed: {why}", may_pass=True), is_logged=False)

    def wait_at_exit(self) -> None:
        """Wait at the process' end for what its user was told would be pushed."""
        if os.getpid() != self._process:  # a process forked from the one that pushes has no thread to wait for
            return
        awaited = [push for push in self.pending() if push.is_awaited]
        if not awaited:
            return
        limit_s = self._exit_limit_s(sum(push.bytes for push in awaited))
        logger.warning("waiting up to %.0f s for %s", limit_s, ", ".join(repr(push.label) for push in awaited))
        try:
            self.wait(limit_s)
        finally:  # also after Ctrl-C
            if left := [repr(push.label) for push in awaited if not push.future.done()]:
                logger.error("not pushed, as the process ends: %s", ", ".join(left))
            self.give_up("the process ended")

    def _work(self) -> None:
        while True:
            with self._changed:
                push = self._running
            if push is None:  # given up
                return
            try:
                result = push.work()
            except Exception as error:
                self._fail(push, error)
            else:
                if self._claim(push):
                    push.future.set_result(result)
            with self._changed:
                if self._running is not push:  # given up, and perhaps followed by others, in a thread of their own
                    return
                self._running = self._waiting.popleft() if self._waiting else None
                if self._running is None:
                    self._changed.notify_all()
                    return

    def _fail(self, push: Push, error: Exception, *, is_logged: bool = True) -> None:
        if self._claim(push):
            if is_logged:
                logger.error("%s", error)
            if push.is_awaited:
                self.failures.append((push.label, str(error)))
            push.future.set_exception(error)

    def _claim(self, push: Push) -> bool:
        """Settle how a push ended, whoever comes first: the thread that does it, or one that gives it up."""
        with self._changed:
            if push.is_settled:
                return False
            push.is_settled = True
        push.clean_up()
        return True


@cache
def _wait_at_exit() -> None:
    # Before thread pools stop taking work, which the client uploads with; `atexit` comes after that.
    getattr(threading, "_register_atexit", atexit.register)(_wait_for_all)


def _wait_for_all() -> None:
    background.join_all()  # a checkpoint that is being written has a push to come
    for queue in list(_queues):
        queue.wait_at_exit()


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
    logger.info("waiting for %s; for %s at most, or until Ctrl-C", _pending_text(queue, url), minutes(most_s))
    told = time.monotonic()
    while not queue.wait(min(_LOOK_EVERY_S, max(0.0, end - time.monotonic()))):
        now = time.monotonic()
        if caught or now >= end:
            queue.give_up("the wait was interrupted" if caught else f"it was not done after {minutes(most_s)}")
            return False
        if now - told >= TELL_EVERY_S:
            told = now
            logger.info("still waiting for %s; for %s more at most", _pending_text(queue, url), minutes(end - now))
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


def _pending_text(queue: PushQueue, url: str) -> str:
    pending = queue.pending()
    left = sum(push.bytes for push in pending)
    names = ", ".join(repr(push.label) for push in pending)
    return f"{len(pending)} {'push' if len(pending) == 1 else 'pushes'} to {url}, {_size_text(left)}: {names}"


def _size_text(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
