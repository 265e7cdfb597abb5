"""What happens to the operations of a process: errors of reading and writing, for a moment or for good, and a kill."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from children import die
from disk import every_operation

from tr_ckpt.testing import CHANGES, READS, shorten_waits

READ_ERRORS = (errno.EIO, errno.EACCES, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EMFILE)
WRITE_ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.ESTALE, errno.EROFS)

# Short, for there are thousands; an error that passes fails less often than there are tries.
DELAYS_S = (0.001, 0.001, 0.002, 0.002)

# How long ranks that save in the background wait for one that cannot say what became of its share.
LIMIT_S = 5.0

PASSING = ("read error that passes", "none")
KINDS = (*PASSING, "read error that stays", "write error that passes", "write error that stays", "kill")
_WEIGHTS = (3, 1, 3, 2, 1, 3)

# Where errors that stay strike: everywhere, or at what has this in its path.
_PLACES = ("", "", "manifest.json", ".safetensors", ".json", "checkpoint-", "checkpoint-2", "checkpoint-4")


@dataclass
class Storm:
    """One of `KINDS`.

    Attributes:
        kind: what happens.
        at: number of the operation at which it begins, from 1.
        number: the error.
        times: how often it strikes, if it passes.
        place: what the paths that it strikes have in them.
        thread: name of the thread that it strikes; empty for all.
    """

    kind: str = "none"
    at: int = 1
    number: int = errno.EIO
    times: int = 1
    place: str = ""
    thread: str = ""

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        self._seen = self._struck = 0
        self._paths: dict[int, str] = {}

    def __str__(self) -> str:
        if self.kind in ("none", "kill"):
            return f"{self.kind} at {self.at}" if self.kind == "kill" else "left alone"
        where = f" in {self.place}" if self.place else ""
        who = f" of {self.thread}" if self.thread else ""
        return f"{self.kind} ({errno.errorcode[self.number]}, {self.times} times) from {self.at} on{where}{who}"

    @contextmanager
    def raging(self) -> Iterator[None]:
        """Let it strike inside the block, which is a process of its own."""
        shorten_waits(DELAYS_S, LIMIT_S)
        with every_operation(self, (*CHANGES, *READS)):
            yield

    def __call__(self, name: str, original: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        with self._lock:
            first = arguments[0]
            path = self._paths.get(first, "") if isinstance(first, int) else str(first)
            self._strike("write" if name in CHANGES else "read", path)
        result = original(*arguments)
        if name in ("open_file", "create"):
            self._paths[result] = path
        return result

    def _strike(self, kind: str, path: str) -> None:
        if not threading.current_thread().name.startswith(self.thread) or self.kind == "none":
            return
        if self.kind == "kill":
            self._seen += 1
            if self._seen == self.at:
                die()
            return
        if not self.kind.startswith(kind) or self.place not in path:
            return
        self._seen += 1
        if self._seen >= self.at and (self.kind.endswith("stays") or self._struck < self.times):
            self._struck += 1
            raise OSError(self.number, os.strerror(self.number), path)


def draw(chance: random.Random) -> Storm:
    """Return one at random."""
    [kind] = chance.choices(KINDS, _WEIGHTS)
    number = chance.choice(READ_ERRORS if kind.startswith("read") else WRITE_ERRORS)
    at = int(2 ** chance.uniform(0, 9.5))  # as many early as late
    stays = kind.endswith("stays")
    place = chance.choice(_PLACES) if stays else ""
    return Storm(kind, at if not place else max(1, at // 8), number, chance.randint(1, len(DELAYS_S)), place)
