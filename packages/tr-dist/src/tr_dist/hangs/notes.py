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

VERDICT, END = "verdict", "end"
_LINK_END_S = 2.0
_MOST_TEXT = 100_000  # characters of a rank's stacks that go through a store
_PLACE_BYTES = 128 * 1024  # of a note or a text in a file
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
    """

    rank: int
    machine: str
    pid: int
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


class Board:
    """Notes and texts in a file that the ranks of a machine share.

    Each has a place of its own in the file, whose unwritten parts take no room on a disk. Once all have opened it, it
    needs no name: `hide` takes that away, and the system the rest when the last rank has ended, however that ends.

    Args:
        path: where; the file is made if it does not exist.
        world_size: number of ranks of the job.
    """

    def __init__(self, path: Path, world_size: int) -> None:
        self._path, self._size = path, world_size
        self._ranks: Sequence[int] = range(world_size)
        self._file = self._open()

    def put(self, note: Note) -> None:
        """Replace the note of a rank."""
        text = json.dumps(asdict(note))
        if len(text) > _PLACE_BYTES - _HEAD.size:
            short = replace(note, where=note.where[:200], left=note.left[:200], counts={}, children=[])
            text = json.dumps(asdict(short))
        self._write(note.rank, text)

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

    def post(self, name: str, text: str) -> bool:
        """Write a text, unless there is one with this name. Returns whether it was written."""
        return self.read(name) is None and self._write(self._place(name), text)

    def read(self, name: str) -> str | None:
        """Return a text; None if there is none."""
        return self._read(self._place(name))

    def posts(self) -> dict[str, str]:
        """Return all texts by name, for another machine."""
        if self.read(VERDICT) is None:
            return {}  # which is the first of all
        names = [VERDICT, END, *(f"stacks-{rank}" for rank in range(self._size))]
        return {name: text[:_MOST_TEXT] for name in names if (text := self.read(name)) is not None}

    def open_for_signals(self, rank: int) -> int:
        """Return a file descriptor for what a signal handler of a rank writes, which is not a text as others are."""
        file = self._open()
        os.lseek(file, _PLACE_BYTES * self._place(f"signal-{rank}"), os.SEEK_SET)
        os.write(file, b"\n")
        return file

    def takes_signals(self, rank: int) -> bool:
        """Return whether a rank has opened its place for a signal handler."""
        return self._raw(rank, 1) != b""

    def read_signal(self, rank: int) -> str:
        """Return what the signal handler of a rank has written; empty if nothing."""
        return self._raw(rank, _PLACE_BYTES).decode("utf-8", "replace").strip()

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

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o600)

    def _place(self, name: str) -> int:
        """Return the place of a text. Signal handlers come last: what they write may be longer than a place."""
        kind, _, rank = name.partition("-")
        return {VERDICT: 1, END: 2, "stacks": 3, "signal": 3 + self._size}[kind] + self._size - 1 + int(rank or 0)

    def _raw(self, rank: int, count: int) -> bytes:
        try:
            os.lseek(self._file, _PLACE_BYTES * self._place(f"signal-{rank}"), os.SEEK_SET)
            return os.read(self._file, count).partition(b"\0")[0]
        except OSError:
            return b""

    def _read(self, place: int) -> str | None:
        with contextlib.suppress(OSError, struct.error):  # the disk fails, or nothing was written so far into the file
            for _ in range(_TRIES):
                os.lseek(self._file, _PLACE_BYTES * place, os.SEEK_SET)
                found = os.read(self._file, _PAGE_BYTES)
                length, checksum = _HEAD.unpack_from(found)
                if not checksum:
                    return None
                found += os.read(self._file, max(0, _HEAD.size + length - len(found)))
                text = found[_HEAD.size : _HEAD.size + length]
                if _checksum(text) == checksum:  # it is not being replaced
                    return text.decode("utf-8", "replace")
        return None

    def _write(self, place: int, text: str) -> bool:
        content = text.encode("utf-8", "backslashreplace")[: _PLACE_BYTES - _HEAD.size]
        try:
            os.lseek(self._file, _PLACE_BYTES * place, os.SEEK_SET)
            os.write(self._file, _HEAD.pack(len(content), _checksum(content)) + content)
        except OSError:  # the disk is full
            return False
        return True


def _checksum(content: bytes) -> int:
    """Return a number other than 0."""
    return zlib.crc32(content) | 1 << 32


class Link:
    """Exchange the boards of machines through a store, in a thread that may be left waiting.

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

    def exchange(self, board: Board, notes: Sequence[Note] | None = None) -> list[Note]:
        """Send the board of this machine, add texts of the others to it, and return their notes.

        Args:
            board: that of this machine.
            notes: what is sent of its ranks; without: what they wrote themselves.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hang watch between machines", daemon=True)
            self._thread.start()
        sent = board.notes() if notes is None else notes
        self._outgoing = json.dumps({"notes": [asdict(note) for note in sent], "posts": board.posts()})
        found: list[Note] = []
        for text in list(self._incoming.values()):
            received = json.loads(text)
            found += [Note(**each) for each in received["notes"]]
            for name, post in received["posts"].items():
                board.post(name, post)
        return found

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
