"""Push in the background, one after the other, and remember what failed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PushQueue:
    """One background thread that does jobs in the order they come; the interpreter waits for them at its end.

    Attributes:
        failures: what each failed job's exception said, in order.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hub-push")
        self._last: Future[Any] | None = None

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Do `job` after those given before. If it fails, that is logged at once and noted in `failures`."""
        future = self._thread.submit(self._run, job)
        self._last = future
        return future

    def is_busy(self) -> bool:
        """Whether a job waits or runs."""
        return self._last is not None and not self._last.done()

    def wait(self) -> None:
        """Return once all jobs are done, however they ended."""
        if self._last is not None:
            self._last.exception()

    def _run(self, job: Callable[[], T]) -> T:
        try:
            return job()
        except Exception as error:
            logger.error("%s", error)
            self.failures.append(str(error))
            raise
