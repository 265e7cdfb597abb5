"""Stand in for the operations by which tr_ckpt changes files, and let one of them kill, tear, fail or find no space."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from children import die

from tr_ckpt.testing import CHANGES, replace_operations

Hook = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]

# What needs space on the disk.
NEEDS_SPACE = ("make_folder", "create", "write", "sync", "link")
FOR_GOOD = -1


def replace_every_operation(hook: Hook, names: Sequence[str] = CHANGES) -> Callable[[], None]:
    """Call `hook(name, original, arguments)` in place of each operation; return what takes that back."""

    def replaced(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: hook(name, partial(original, **options), arguments)

    return replace_operations(replaced, names)


@contextmanager
def every_operation(hook: Hook, names: Sequence[str] = CHANGES) -> Iterator[None]:
    """Call `hook(name, original, arguments)` in place of each operation in the block."""
    undo = replace_every_operation(hook, names)
    try:
        yield
    finally:
        undo()


def path_of(argument: Any) -> str:
    """Return the path of what an operation is done to, which a number may stand for."""
    return os.readlink(f"/proc/self/fd/{argument}") if isinstance(argument, int) else str(argument)


def write_half(arguments: tuple[Any, ...]) -> None:
    """Do half of a write."""
    descriptor, data = arguments
    os.write(descriptor, data[: len(data) // 2])


@dataclass
class Breaker:
    """Counts the operations of all threads, and lets the n-th fail.

    Args:
        at: number of the operation that fails, from 1; 0 lets all pass.
        mode: `kill` ends the process before the operation, `tear` in the middle of a write, `error` fails this one
            operation, `full` leaves no space for this and all later ones that need some.
        times: how many operations fail from there on in `error`; `FOR_GOOD` for all.
        error: name of that error.
    """

    at: int = 0
    mode: str = "kill"
    times: int = 1
    error: str = "EIO"
    done: list[str] = field(default_factory=list)
    struck: int = 0
    where: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.RLock()

    def __call__(self, name: str, original: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            self.done.append(name)
            number = len(self.done)
        if self.at and number >= self.at:
            self._fail(name, arguments, number - self.at)
        return original(*arguments)

    def _fail(self, name: str, arguments: tuple[Any, ...], later: int) -> None:
        if self.mode in ("kill", "tear"):
            if self.mode == "tear" and name == "write":
                write_half(arguments)
            die()
        if self.mode == "full" and name in NEEDS_SPACE:
            if not later and name == "write":
                write_half(arguments)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.mode == "error" and (self.times < 0 or later < self.times):
            self.struck += 1
            self.where = self.where or f"{name} {arguments[-1 if name == 'sync' else 0]}"
            code = getattr(errno, self.error)
            raise OSError(code, os.strerror(code))
