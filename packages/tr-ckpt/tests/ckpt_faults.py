"""Make the n-th operation on the file system fail, in the ways that it fails in life."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from tr_ckpt import files, folder_lock, names


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
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Faults:
        for name in files.OPERATIONS:
            self._originals[name] = getattr(files, name)
            setattr(files, name, self._guarded(name, self._originals[name]))
        return self

    def __exit__(self, *_: object) -> None:
        for name, original in self._originals.items():
            setattr(files, name, original)
        if self.mode in ("kill", "tear"):
            names._IN_USE.clear()  # what a dead process knew is forgotten

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
