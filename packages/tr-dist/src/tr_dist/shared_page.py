"""Exchange a few numbers between the ranks of one machine through a page of shared memory, without a collective."""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from tr_dist.hangs.places import names_of_exchanges

try:
    import fcntl
except ImportError:  # Windows; ranks there exchange by a collective
    fcntl: Any = None

# A rank may start this many exchanges before it must have read the first. A slot is written again after twice as many:
# a rank starts exchange k after all started k - 4, each of which had read k - 8 by then.
_OPEN = 4
_SLOTS = 2 * _OPEN
_MOST_VALUES = 16
_WORDS = 2 * _MOST_VALUES
_KEY_BYTES = 16
_SHARED_FOLDER = Path("/dev/shm")
# A rank that waits lets others run, then sleeps, and looks now and then whether they are still there.
_SPINS, _SLEEP_S, _LOOK_S = 200, 0.0001, 0.05


names_of_exchanges[__file__] = lambda code: SharedPage.all_reduce_max.__name__


class SharedPage:
    """The ranks of one machine, which find the largest of some numbers in shared memory.

    Each rank writes its numbers into a slot of its own and reads those of all others. A written word is eight bytes:
    half of it the number of the exchange, so that a reader sees by the word itself whether it is there.

    Args:
        file: the page, from `open_page`, which is closed by `close`.
        rank: number of this process among all, from 0.
        world_size: number of processes, all of them on this machine.
        timeout_s: seconds after which a rank stops waiting for the others.
    """

    def __init__(self, file: BinaryIO, rank: int, world_size: int, timeout_s: float) -> None:
        self._file, self._rank, self._size, self._timeout_s = file, rank, world_size, timeout_s
        self._words = memoryview(mmap.mmap(file.fileno(), page_bytes(world_size)))[_KEY_BYTES:].cast("Q")
        self._started = 0
        self._open: dict[int, list[int]] = {}  # exchanges that were started and not read, with where to put the result
        # Of this process only, not of its children; the system takes it back when the process ends.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def all_reduce_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start to find the largest of each of `values` over all ranks; the returned function waits, and returns them.

        All ranks start such calls in the same order, with as many values.
        """
        parts = [self._start(values[first : first + _MOST_VALUES]) for first in range(0, len(values), _MOST_VALUES)]
        return lambda: [value for part in parts for value in part()]

    def number_started(self) -> int:
        """Return how many exchanges this rank has started."""
        return self._started

    def close(self) -> None:
        """Tell the others that this rank starts no more exchanges."""
        if not self._file.closed:
            self._words[self._rank] = 1
            self._file.close()

    def _start(self, values: Sequence[int]) -> Callable[[], list[int]]:
        self._started = number = self._started + 1
        if number - _OPEN in self._open:
            self._finish(number - _OPEN)
        words, at = self._words, self._slot(self._rank, number)
        tag = (number & 0xFFFFFFFF) << 32
        for value in values:
            words[at], words[at + 1] = tag | (value >> 32 & 0xFFFFFFFF), tag | (value & 0xFFFFFFFF)
            at += 2
        self._open[number] = result = list(values)

        def read() -> list[int]:
            if number in self._open:
                self._finish(number)
            return list(result)

        return read

    def _finish(self, number: int) -> None:
        """Wait for the values of all ranks, and store the largest."""
        result, tag = self._open[number], number & 0xFFFFFFFF
        count = 2 * len(result)
        own = self._slot(self._rank, number)
        own_words = self._words[own : own + count]
        for rank in range(self._size):
            at = self._slot(rank, number)
            words = self._words[at : at + count]
            if words == own_words:  # it has written the same: so most exchanges end
                continue
            words = words.tolist()
            if any(word >> 32 != tag for word in words):
                words = self._wait_for(rank, at, count, tag)
            for index in range(0, count, 2):
                value = (words[index] & 0xFFFFFFFF) << 32 | (words[index + 1] & 0xFFFFFFFF)
                value -= value >> 63 << 64
                result[index // 2] = max(result[index // 2], value)
        del self._open[number]

    def _wait_for(self, rank: int, at: int, count: int, tag: int) -> list[int]:
        began_s = looked_s = time.monotonic()
        spins = 0
        while True:
            time.sleep(0 if spins < _SPINS else _SLEEP_S)
            spins += 1
            now_s, is_gone = time.monotonic(), False
            if now_s - looked_s > _LOOK_S:
                looked_s, is_gone = now_s, self._has_left(rank)
            # Read after the look: what a rank wrote before it left is there.
            words = self._words[at : at + count].tolist()
            if all(word >> 32 == tag for word in words):
                return words
            if is_gone:
                raise RuntimeError(
                    f"rank {rank} has ended, and rank {self._rank} waits for it; see its own output for the reason"
                )
            if now_s - began_s > self._timeout_s:
                raise RuntimeError(
                    f"rank {self._rank} waited {self._timeout_s:g} s for rank {rank}, which runs but did not come to "
                    "this point; see what it does, or give it longer by ddp_timeout"
                )

    def _has_left(self, rank: int) -> bool:
        if self._words[rank]:
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False  # its owner lives
        return True

    def _slot(self, rank: int, number: int) -> int:
        return self._size + (rank * _SLOTS + number % _SLOTS) * _WORDS


def page_bytes(world_size: int) -> int:
    """Return the size of a page in bytes: a key, a word a rank, and the slots of each."""
    return _KEY_BYTES + 8 * world_size * (1 + _SLOTS * _WORDS)


def open_page(gather: Callable[[Any], list[Any]], rank: int, world_size: int, timeout_s: float) -> SharedPage | None:
    """Return a page that all ranks share, or None on all of them where they cannot. Collective.

    They cannot on several machines, in containers that share no memory, or without POSIX locks.

    Args:
        gather: returns the value of every rank, in rank order.
        rank: number of this process among all, from 0.
        world_size: number of processes.
        timeout_s: seconds after which a rank stops waiting for the others.
    """
    made = _make(world_size) if rank == 0 and fcntl is not None else None
    path, key = gather(None if made is None else made[1:])[0] or ("", b"")
    file = made[0] if made is not None else _opened(path, key)
    try:
        page = None if file is None else SharedPage(file, rank, world_size, timeout_s)
    except OSError:
        page = None
    is_shared = all(gather(page is not None))
    if path and rank == 0:
        Path(path).unlink()  # the mapped memory stays until the last rank has ended, however it ends
    if is_shared:
        return page
    if file is not None:
        file.close()
    return None


def _make(world_size: int) -> tuple[BinaryIO, str, bytes] | None:
    """Return a new page's open file, its path and its key; None where there is no room for it."""
    folder = _SHARED_FOLDER if os.access(_SHARED_FOLDER, os.W_OK) else None
    key = secrets.token_bytes(_KEY_BYTES)
    file, path = None, ""
    try:
        handle, path = tempfile.mkstemp(prefix="tr-ranks-", dir=folder)
        file = os.fdopen(handle, "r+b", buffering=0)
        # Written and not only made longer: a full disk shows here, and not as a signal at a later write.
        if file.write(key.ljust(page_bytes(world_size), b"\0")) == page_bytes(world_size):
            return file, path, key
    except OSError:
        pass
    if file is not None:
        file.close()
        with suppress(OSError):
            os.unlink(path)
    return None


def _opened(path: str, key: bytes) -> BinaryIO | None:
    """Return the open file of another rank's page; None if it is not there, as on another machine."""
    if not path or fcntl is None:
        return None
    try:
        file = os.fdopen(os.open(path, os.O_RDWR), "r+b", buffering=0)
    except OSError:
        return None
    if file.read(_KEY_BYTES) == key:
        return file
    file.close()
    return None
