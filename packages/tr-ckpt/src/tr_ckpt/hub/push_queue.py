"""Push in the background, one after the other, and remember what failed."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from tr_ckpt import background
from tr_ckpt.errors import PushError

logger = logging.getLogger(__name__)


def _nothing() -> None:
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
    clean_up: Callable[[], None] = _nothing
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
