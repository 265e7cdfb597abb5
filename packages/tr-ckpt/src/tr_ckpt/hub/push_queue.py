"""Push in the background, one after the other, record failures, and wait for the rest at the end of a run.

The wait logs what it waits for. Its limit follows from the bytes to upload, and a signal ends it.
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
    """A job for the queue.

    Attributes:
        label: its name in messages.
        work: the job; its result is the future's.
        bytes: the most that it uploads.
        clean_up: called once it is done, failed or given up.
        is_awaited: whether the end of the process waits for it.
        future: of the result.
    """

    label: str
    work: Callable[[], Any]
    bytes: int = 0
    clean_up: Callable[[], None] = _do_nothing
    is_awaited: bool = True
    future: Future[Any] = field(default_factory=Future)


_queues: weakref.WeakSet[PushQueue] = weakref.WeakSet()


class PushQueue:
    """One background thread that runs pushes in the order they come, while there are any.

    Where no thread can be started, as with Python 3.12.0 to 3.12.2 while the process ends, `submit` runs them.
    The thread ends with the process, even in the middle of a push: a request to a Hub that hangs cannot be ended
    otherwise. The end of the process waits for the queue for at most `exit_limit_s`.

    Args:
        most_waiting: how many may wait. One more makes the oldest of them fail: each holds a copy on the disk.
        exit_limit_s: returns the longest wait at the process' end, given the bytes that are left.

    Attributes:
        failures: label and exception text of each awaited push that failed.
    """

    def __init__(self, most_waiting: int, exit_limit_s: Callable[[int], float]) -> None:
        self.failures: list[tuple[str, str]] = []
        self._most_waiting = most_waiting
        self._exit_limit_s = exit_limit_s
        self._changed = threading.Condition()
        self._pushes: deque[Push] = deque()  # the first is under way
        self._process = os.getpid()
        _queues.add(self)
        _wait_at_exit()

    def submit(self, push: Push) -> Future[Any]:
        """Run `push` after those submitted before. Its failure is logged at once and added to `failures`."""
        with self._changed:
            if len(self._pushes) > self._most_waiting:
                surplus = self._pushes[1]
                self._end(
                    surplus, None, PushError(f"{surplus.label!r} was not pushed: {self._most_waiting} newer ones wait")
                )
            self._pushes.append(push)
            is_first = len(self._pushes) == 1
        if is_first:
            try:
                threading.Thread(target=self._work, name="hub-push", daemon=True).start()
            except RuntimeError as error:
                logger.warning("%r is pushed in the foreground: %s", push.label, error)
                self._work()
        return push.future

    def pending(self) -> list[Push]:
        """Return the running and the waiting pushes, in order."""
        with self._changed:
            return list(self._pushes)

    def is_busy(self) -> bool:
        """Whether a push is waiting or running."""
        return bool(self.pending())

    def wait(self, seconds: float | None = None) -> bool:
        """Wait at most `seconds`, or without limit if None; return whether all pushes are done."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pushes, seconds)

    def give_up(self, why: str) -> None:
        """Make all unfinished pushes fail; the running one continues, and its result is dropped."""
        with self._changed:
            for push in self.pending():
                error = PushError(f"{push.label!r} was not pushed: {why}", may_pass=True)
                self._end(push, None, error, is_logged=False)

    def wait_at_exit(self) -> None:
        """Wait at the process' end for pushes that the log announced."""
        if os.getpid() != self._process:  # a fork has no thread to wait for
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
        while pending := self.pending():
            result, error = None, None
            try:
                result = pending[0].work()
            except Exception as failure:
                error = failure
            except BaseException:  # such as Ctrl-C in the foreground: no thread is left to wait for
                self.give_up("it was interrupted")
                raise
            if not self._end(pending[0], result, error):  # given up; a newer thread may run others by now
                return

    def _end(self, push: Push, result: Any, error: Exception | None, *, is_logged: bool = True) -> bool:
        """Take a push out of the queue once its future is set; False if another thread has done so."""
        with self._changed:
            if push not in self._pushes:
                return False
            push.clean_up()
            if error is None:
                push.future.set_result(result)
            else:
                self._note(push, error, is_logged)
                push.future.set_exception(error)
            self._pushes.remove(push)
            self._changed.notify_all()
            return True

    def _note(self, push: Push, error: Exception, is_logged: bool) -> None:
        if is_logged:
            logger.error("%s", error)
        if push.is_awaited:
            self.failures.append((push.label, str(error)))


@cache
def _wait_at_exit() -> None:
    # Runs before thread pools, which the client uploads with, stop accepting work; `atexit` runs after that.
    getattr(threading, "_register_atexit", atexit.register)(_wait_for_all)


def _wait_for_all() -> None:
    background.join_all()  # a checkpoint that is still being written will submit a push
    for queue in list(_queues):
        queue.wait_at_exit()


# The limit of the wait: a fixed time for the Hub's own work, and the time for the bytes on a slow line.
BASE_S = 600.0
SLOWEST_BYTES_PER_S = 2e6

# How often the wait is logged.
TELL_EVERY_S = 60.0

_LOOK_EVERY_S = 0.2
_REPEATED_WITHIN_S = 1.0


def limit_s(left_bytes: int) -> float:
    """Return the longest wait for pushes of so many bytes."""
    return BASE_S + left_bytes / SLOWEST_BYTES_PER_S


def wait_for(queue: PushQueue, url: str, caught: list[int], most_s: float | None = None) -> bool:
    """Wait for all pushes and return True; after the limit or a signal give up the rest, and return False.

    Args:
        queue: the pushes.
        url: their target, for messages.
        caught: the list of `interrupts`; the first signal in it ends the wait at once.
        most_s: the longest wait; None uses `limit_s`.
    """
    pending = queue.pending()
    if not pending:
        return True
    most_s = limit_s(sum(push.bytes for push in pending)) if most_s is None else most_s
    end = time.monotonic() + most_s
    logger.info("waiting for %s; for %s at most, or until Ctrl-C", _pending_text(queue, url), minutes(most_s))
    logged_at = time.monotonic()
    while not queue.wait(min(_LOOK_EVERY_S, max(0.0, end - time.monotonic()))):
        now = time.monotonic()
        if caught or now >= end:
            queue.give_up("the wait was interrupted" if caught else f"it was not done after {minutes(most_s)}")
            return False
        if now - logged_at >= TELL_EVERY_S:
            logged_at = now
            logger.info("still waiting for %s; for %s more at most", _pending_text(queue, url), minutes(end - now))
    return True


@contextmanager
def interrupts(*, after_signal: bool = False) -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM inside the block, unless they are ignored; then act on the first.

    The signal is sent again, to its previous handler. If that does not end the process, `KeyboardInterrupt` is raised,
    or `SystemExit` with code 128 + the signal's number.

    Args:
        after_signal: whether a signal has just ended the run. The same signal may then arrive once more, from a
            launcher that passes on what the system sent to all processes; it is ignored. Ctrl-C never is.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield caught
        return
    begun = time.monotonic()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT or not after_signal or time.monotonic() - begun >= _REPEATED_WITHIN_S:
            caught.append(number)

    former = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # A handler that reads as None was set outside Python, and cannot be restored from here.
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
    """Format a time for messages."""
    return f"{seconds / 60:.0f} min" if seconds >= 60 else f"{seconds:.0f} s"


def _pending_text(queue: PushQueue, url: str) -> str:
    pending = queue.pending()
    left = sum(push.bytes for push in pending)
    names = ", ".join(repr(push.label) for push in pending)
    return f"{len(pending)} {'push' if len(pending) == 1 else 'pushes'} to {url}, {_size_text(left)}: {names}"


def _size_text(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
