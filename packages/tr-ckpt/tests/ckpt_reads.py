"""Make reads of checkpoints fail, for a moment or for good."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tr_ckpt import reads

T = TypeVar("T")

ERRNOS = (errno.EIO, errno.EACCES, errno.ESTALE)


def error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


class BadReads:
    """Replace every operation of `tr_ckpt.reads` while inside the `with`; some fail.

    Args:
        number: the error of those that fail.
        times: how often, 0 for always.
        after: how many of those that `where` names succeed before the first that fails.
        where: what a failing operation's path holds in its text.
        operations: names of those that fail.
        thread: name of the one thread in which they fail; empty for all.
    """

    def __init__(
        self,
        number: int = errno.EIO,
        *,
        times: int = 0,
        after: int = 0,
        where: str = "",
        operations: tuple[str, ...] = reads.READS,
        thread: str = "",
    ) -> None:
        self.number, self.times, self.after, self.where, self.operations = number, times, after, where, operations
        self.thread = thread
        self.failed = 0
        self.log: list[str] = []
        self._matched = 0
        self._originals: dict[str, Callable[..., Any]] = {}
        self._paths: dict[int, str] = {}

    def __enter__(self) -> BadReads:
        for name in reads.READS:
            self._originals[name] = getattr(reads, name)
            setattr(reads, name, self._guarded(name, self._originals[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(reads, name, original)

    def _guarded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(first: Path | int, *rest: Any, **options: Any) -> Any:
            path = self._paths.get(first, "") if isinstance(first, int) else str(first)
            self.log.append(name)
            is_here = self.thread in ("", threading.current_thread().name)
            if is_here and name in self.operations and self.where in path:
                self._matched += 1
                if self._matched > self.after and (self.times == 0 or self.failed < self.times):
                    self.failed += 1
                    raise error(self.number)
            result = original(first, *rest, **options)
            if name == "open_file":
                self._paths[result] = path
            return result

        return operation


def in_threads(work: Callable[[int, Callable[[Any], list[Any]]], T], number: int = 2) -> list[T | Exception]:
    """Call `work(rank, gather_objects)` in threads named `rank-0`, ...; returns what each returned or raised."""
    barrier = threading.Barrier(number, timeout=60)
    values: list[Any] = [None] * number
    answers: list[Any] = [None] * number

    def run(rank: int) -> None:
        def gather_objects(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            gathered = list(values)
            barrier.wait()
            return gathered

        try:
            answers[rank] = work(rank, gather_objects)
        except Exception as caught:
            answers[rank] = caught

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    return answers
