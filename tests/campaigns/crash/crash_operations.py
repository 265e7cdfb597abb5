"""Record the operations by which tr_ckpt changes the file system."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disk import Breaker

LOCK = ".run-lock.json"  # of the run, in the folder of its checkpoints


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
            if self.inner.at and len(self.inner.done) + 1 >= self.inner.at and self.dying is not None:
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
