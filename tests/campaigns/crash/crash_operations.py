"""Count, record and break the operations by which tr_ckpt changes the file system."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash_process import die

from tr_ckpt.testing import replace_operations

LOCK = ".run-lock.json"  # of the run, in the folder of its checkpoints

# What needs space on the disk.
NEEDS_SPACE = ("make_folder", "create", "write", "sync", "link")


@dataclass
class Breaker:
    """Replaces every operation that changes files, in all threads, and lets the n-th fail.

    Args:
        at: number of the operation that fails, from 1; None lets all pass.
        mode: `kill` ends the process before the operation, `tear` in the middle of a write, `error` fails this one
            operation, `full` leaves no space for this and all later ones that need some.
    """

    at: int | None = None
    mode: str = "kill"
    done: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.RLock()

    def __call__(self, name: str, original: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            self.done.append(name)
            number = len(self.done)
        if self.at is not None and number >= self.at:
            self._fail(name, arguments, first=number == self.at)
        return original(*arguments)

    def _fail(self, name: str, arguments: tuple[Any, ...], *, first: bool) -> None:
        if self.mode in ("kill", "tear"):
            if self.mode == "tear" and name == "write":
                _write_half(arguments)
            die()
        if self.mode == "full" and name in NEEDS_SPACE:
            if first and name == "write":
                _write_half(arguments)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.mode == "error" and first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def every_operation(hook: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[None]:
    """Call `hook(name, original, arguments)` in place of each operation."""
    undo = replace_operations(lambda name, original: lambda *arguments: hook(name, original, arguments))
    try:
        yield
    finally:
        undo()


@dataclass(frozen=True)
class Event:
    """One operation that was done, or something that the run was told.

    Attributes:
        kind: the operation's name; `found_folder` and `found_file` for what others than tr_ckpt put there, which is as
            it is at that moment; `promise` where the run was told that its newest checkpoint is safe.
        path: what it was done to, absolute.
        target: the other path of a rename or link.
        inode: of a file.
        data: what was written, or found.
        step: what was promised.
        site: file and line of the operation's caller.
    """

    kind: str
    path: str = ""
    target: str = ""
    inode: int = 0
    data: bytes = b""
    step: int = 0
    site: tuple[str, int] = ("", 0)


class Recorder:
    """Notes every operation, with all that it needs to be done again.

    Args:
        root: the folder below which things happen.
        inner: what decides about each operation, as a `Breaker` does; by default all pass.
    """

    def __init__(self, root: Path, inner: Breaker | None = None) -> None:
        self.root = root
        self.inner = inner or Breaker()
        self.events: list[Event] = []
        self.dying: Callable[[], None] | None = None
        self._lock = threading.RLock()
        self._known: set[str] = set()
        for path in root.rglob("*"):
            self._known.add(str(path))

    def promise(self, step: int) -> None:
        with self._lock:
            self.events.append(Event("promise", step=step))

    def __call__(self, name: str, original: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            self._look_around()
            if self.inner.at is not None and len(self.inner.done) + 1 >= self.inner.at and self.dying is not None:
                self.dying()
            result = self.inner(name, original, arguments)
            self._note(name, arguments, result)
        return result

    def _note(self, name: str, arguments: tuple[Any, ...], result: Any) -> None:
        frame = sys._getframe(3)
        site = (frame.f_code.co_filename, frame.f_lineno)
        if name in ("write", "sync"):
            inode = os.fstat(arguments[0]).st_ino
            data = bytes(arguments[1]) if name == "write" else b""
            self.events.append(Event(name, inode=inode, data=data, site=site))
            return
        path = str(arguments[0])
        target = str(arguments[1]) if len(arguments) > 1 else ""
        inode = os.fstat(result).st_ino if name == "create" else 0
        self._known.add(target or path)
        if name == "rename":
            moved = [known for known in self._known if known == path or known.startswith(path + "/")]
            self._known.difference_update(moved)
            self._known.update(target + known.removeprefix(path) for known in moved)
        self.events.append(Event(name, path, target, inode, site=site))

    def _look_around(self) -> None:
        """Note what no operation of ours put there: by the run itself, or its other writers."""
        for path in sorted(self.root.rglob("*")):
            if str(path) not in self._known:
                self._find(path)

    def _find(self, path: Path) -> None:
        self._known.add(str(path))
        if path.is_dir():
            self.events.append(Event("found_folder", str(path)))
        else:
            self.events.append(Event("found_file", str(path), inode=path.stat().st_ino, data=path.read_bytes()))


def _write_half(arguments: tuple[Any, ...]) -> None:
    descriptor, data = arguments
    os.write(descriptor, data[: len(data) // 2])
