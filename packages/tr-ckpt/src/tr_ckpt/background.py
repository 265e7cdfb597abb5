"""Run one background job at a time; always wait for its end, report its failure."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)

# Shorter waits are not logged.
_NOTICEABLE_S = 0.1


_all: weakref.WeakSet[Background] = weakref.WeakSet()


def join_all() -> None:
    """Wait for the running jobs of all `Background` objects."""
    for background in list(_all):
        background.join()


class Background:
    """At most one thread, and the failure of its last job.

    The interpreter waits for the thread before it exits, also after `sys.exit` or an exception. A forked process
    inherits neither the thread nor its failure.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._has_warned = False
        _all.add(self)

    def start(self, name: str, job: Callable[[], None]) -> None:
        """Start `job`; the previous job must have ended. Its failure is logged at once and kept for `raise_failure`.

        Where no thread can be started, as while the interpreter exits, the job runs before this returns.
        """
        self.join()

        def run() -> None:
            try:
                job()
            except BaseException as error:  # of any kind: nobody catches the exceptions of a thread
                self._error = error
                logger.error("in the background: %s: %s", type(error).__name__, error)

        if not threading.main_thread().is_alive():  # exiting: nothing would wait for a thread that starts now
            run()
            return
        self._thread = threading.Thread(target=run, name=name, daemon=False)
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning("%s continues in the foreground: %s", name, error)
            self._thread = None
            run()

    def is_busy(self) -> bool:
        """Whether a job is running."""
        self._forget_if_forked()
        return self._thread not in (None, threading.current_thread()) and self._thread.is_alive()

    def join(self) -> None:
        """Wait for the running job, unless it is the caller; raises nothing."""
        self._forget_if_forked()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()
            self._thread = None

    def hold_up(self) -> None:
        """Join while training waits, and log how long; the first time as a warning."""
        if not self.is_busy():
            return
        begun = time.monotonic()
        self.join()
        waited_s = time.monotonic() - begun
        if waited_s >= _NOTICEABLE_S:
            level, self._has_warned = logging.INFO if self._has_warned else logging.WARNING, True
            text = (
                "training waited %.1f s for the checkpoint before to be written; save less often, or to a faster disk"
            )
            logger.log(level, text, waited_s)

    def raise_failure(self) -> None:
        """Raise the exception of a job that failed since the last call. Does not wait."""
        self._forget_if_forked()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _forget_if_forked(self) -> None:
        if self._process != os.getpid():
            self._thread, self._error, self._process = None, None, os.getpid()
