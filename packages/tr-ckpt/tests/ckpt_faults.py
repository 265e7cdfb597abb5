"""Make operations on the file system fail or wait: writes, and reads of checkpoints."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tr_ckpt import files, folder_lock, processes, testing


def forget_temporaries() -> None:
    """Forget which temporary folders are in use, as a process does that ends."""
    processes._IN_USE.clear()


class Killed(BaseException):
    """The process is gone: from here on no operation works, and no handler can do anything about it."""


class Faults:
    """Replace every operation of `tr_ckpt.files` while inside the `with`, and count them.

    Args:
        at: number of the operation that fails, from 1; None lets all pass.
        mode: `kill` ends the process before the operation, `tear` in the middle of a write, `error` fails this one
            operation, `full` leaves no space for this and all later ones that need some.
    """

    def __init__(self, at: int | None = None, mode: str = "kill") -> None:
        self.at = at
        self.mode = mode
        self.log: list[str] = []

    def __enter__(self) -> Faults:
        gc.collect()  # a Checkpointer that a test before left drops its lock now, and not among these operations
        self._take_back = testing.replace_operations(self._guarded)
        return self

    def __exit__(self, *_: object) -> None:
        self._take_back()
        if self.mode in ("kill", "tear"):
            forget_temporaries()

    def _guarded(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            self.log.append(name)
            if self.at is not None and len(self.log) >= self.at:
                self._fail(name, arguments)
            return original(*arguments)

        return operation

    def _fail(self, name: str, arguments: tuple[Any, ...]) -> None:
        first = len(self.log) == self.at
        if self.mode == "tear" and first and name == "write":
            descriptor, data = arguments
            os.write(descriptor, data[: len(data) // 2])
        if self.mode in ("kill", "tear"):
            folder_lock._held.clear()  # a dead process unlocks nothing
            raise Killed(f"before operation {self.at}, {name}")
        needs_space = name in ("make_folder", "create", "write", "sync", "link")
        if (self.mode == "error" and first) or (self.mode == "full" and needs_space):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
        operations: tuple[str, ...] = testing.READS,
        thread: str = "",
    ) -> None:
        self.number, self.times, self.after, self.where, self.operations = number, times, after, where, operations
        self.thread = thread
        self.failed = 0
        self.log: list[str] = []
        self._matched = 0
        self._paths: dict[int, str] = {}

    def __enter__(self) -> BadReads:
        self._take_back = testing.replace_operations(self._guarded, testing.READS)
        return self

    def __exit__(self, *_: object) -> None:
        self._take_back()

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


PATIENCE_S = 60


class Held:
    """Blocks every write of a file in the background until `let_go`; another thread of this one has its name."""

    def __init__(self):
        self.begun, self._go, self._main = threading.Event(), threading.Event(), threading.current_thread().name
        self._write = files.write

    def write(self, descriptor, data):
        if threading.current_thread().name != self._main:
            self.begun.set()
            assert self._go.wait(PATIENCE_S)
        self._write(descriptor, data)

    def let_go(self):
        self._go.set()

    def wait_until_writing(self):
        assert self.begun.wait(PATIENCE_S)


@contextmanager
def held():
    """Hold what is written inside the block; at its end all goes on."""
    holding = Held()
    files.write = holding.write
    try:
        yield holding
    finally:
        files.write = holding._write
        holding.let_go()
