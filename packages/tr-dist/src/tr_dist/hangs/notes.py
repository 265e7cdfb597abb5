"""Keep the notes of the ranks where all can read them: in a file of each machine, and between machines in a store.

A file needs nobody who serves it: it is read while any rank is stopped or dead. A store is served by rank 0, or by a
launcher, and does not answer while that process is stopped. So it is used in a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

_LINK_END_S = 2.0
_MOST_TEXT, _LEAST_TEXT = 100_000, 10_000  # characters of a rank's stacks: mostly, and in a note that is too long
_PLACE_BYTES = 128 * 1024  # of a note in a file
_PAGE_BYTES = 4096  # a note is mostly shorter
_HEAD = struct.Struct("=QQ")  # its length and its checksum
_TRIES = 3


@dataclass(frozen=True)
class Note:
    """What a rank says about itself.

    Attributes:
        rank: its number among all.
        machine: its machine; see `places.machine`.
        pid: number of its process.
        place: its coordinates in a mesh, such as `dp_shard 1, tp 0`; empty without one.
        born: when its process began, as the system counts.
        beat: counts the notes; it stands still if the process is stopped, or holds Python's lock.
        idle_s: seconds since it last made progress.
        step: number of completed steps; -1 if unknown.
        phase: what its loop does; empty outside of one.
        exchange: the exchange between ranks that it is in; see `places.Place`.
        where: function, file and line.
        counts: exchanges that it has started, by group.
        is_debugged: whether a debugger holds it.
        left: how it left the group; empty while it is a member.
        children: its processes that load data.
        takes_signal: whether a signal makes it write its stacks.
        verdict: why it ends the job; empty while it does not.
        stacks: Python stacks of its threads, once the job is to be ended.
        is_reported: whether it knows that the report was written.
    """

    rank: int
    machine: str
    pid: int
    place: str = ""
    born: str = ""
    beat: int = 0
    idle_s: float = 0.0
    step: int = -1
    phase: str = ""
    exchange: str = ""
    where: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    is_debugged: bool = False
    left: str = ""
    children: list[int] = field(default_factory=list)
    takes_signal: bool = False
    verdict: str = ""
    stacks: str = ""
    is_reported: bool = False


class Board:
    """Notes in a file that the ranks of a machine share.

    Each has a place of its own in the file, whose unwritten parts take no room on a disk. Once all have opened it, it
    needs no name: `hide` takes that away, and the system the rest when the last rank has ended, however that ends.

    Args:
        path: where; the file is made if it does not exist.
        world_size: number of ranks of the job.
    """

    def __init__(self, path: Path, world_size: int) -> None:
        self._path, self._size = path, world_size
        self._ranks: Sequence[int] = range(world_size)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)

    def put(self, note: Note) -> None:
        """Replace the note of a rank."""
        text = _written(replace(note, stacks=note.stacks[:_MOST_TEXT]))
        if len(text) > _PLACE_BYTES - _HEAD.size:
            short = replace(note, where=note.where[:200], left=note.left[:200], counts={}, children=[])
            text = _written(replace(short, stacks=note.stacks[:_LEAST_TEXT]))
        with contextlib.suppress(OSError):  # the disk is full
            os.lseek(self._file, _PLACE_BYTES * note.rank, os.SEEK_SET)
            os.write(self._file, _HEAD.pack(len(text), _checksum(text)) + text)

    def notes(self) -> list[Note]:
        """Return the notes of all ranks that have written one here, in rank order."""
        found = []
        for text in map(self._read, self._ranks):
            with contextlib.suppress(ValueError, TypeError):
                found += [] if text is None else [Note(**json.loads(text))]
        return found

    def close_to(self, ranks: Sequence[int]) -> None:
        """Look for notes of these ranks only from now on: those of this machine, once each has written one."""
        self._ranks = ranks

    def hide(self) -> None:
        """Remove the name of the file, which all ranks have opened."""
        with contextlib.suppress(OSError):  # another rank was first
            self._path.unlink()

    def close(self) -> None:
        """Close the file; nothing is read or written after it."""
        with contextlib.suppress(OSError):
            os.close(self._file)
        self._file = -1
        self.hide()  # where an open file cannot be removed, as on Windows, the last rank does it

    def _read(self, rank: int) -> bytes | None:
        with contextlib.suppress(OSError, struct.error):  # the disk fails, or nothing was written so far into the file
            for _ in range(_TRIES):
                os.lseek(self._file, _PLACE_BYTES * rank, os.SEEK_SET)
                found = os.read(self._file, _PAGE_BYTES)
                length, checksum = _HEAD.unpack_from(found)
                if not checksum:
                    return None
                found += os.read(self._file, max(0, _HEAD.size + length - len(found)))
                text = found[_HEAD.size : _HEAD.size + length]
                if _checksum(text) == checksum:  # it is not being replaced
                    return text
        return None


def _written(note: Note) -> bytes:
    return json.dumps(asdict(note)).encode()


def _checksum(content: bytes) -> int:
    """Return a number other than 0."""
    return zlib.crc32(content) | 1 << 32


class Link:
    """Exchange the notes of machines through a store, in a thread that may be left waiting.

    Args:
        connect: opens a connection of its own to the store.
        own: the key of this machine.
        others: the keys of the other machines.
        interval_s: seconds between two exchanges.
    """

    def __init__(self, connect: Callable[[], Any], own: str, others: list[str], interval_s: float) -> None:
        self._connect, self._own, self._others, self._interval_s = connect, own, others, interval_s
        self._outgoing, self._incoming = "", dict[str, str]()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def exchange(self, notes: Sequence[Note]) -> list[Note]:
        """Send the notes of this machine, and return the last ones of the others."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hang watch between machines", daemon=True)
            self._thread.start()
        self._outgoing = json.dumps([asdict(note) for note in notes])
        return [Note(**each) for text in list(self._incoming.values()) for each in json.loads(text)]

    def stop(self) -> None:
        """Exchange nothing more. Waits a moment: a thread in torch's code must not meet the interpreter's end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_LINK_END_S)

    @property
    def is_running(self) -> bool:
        """Whether the thread is there; it outlives `stop` while the store is cut off."""
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # who serves the store is gone
            store = self._connect()
            while not self._stop.wait(self._interval_s):
                store.set(self._own, self._outgoing)
                for key in self._others:
                    if store.check([key]):
                        self._incoming[key] = store.get(key).decode()
