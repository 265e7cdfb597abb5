"""Keep the notes of the ranks where all can read them: in a folder of each machine, and between machines in a store.

A folder needs nobody who serves it: it is read while any rank is stopped or dead. A store is served by rank 0, or by a
launcher, and does not answer while that process is stopped. So it is used in a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

VERDICT, END = "verdict", "end"
_LINK_END_S = 2.0
_MOST_TEXT = 100_000  # characters of a rank's stacks that go through a store


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
    """Notes and texts in a folder that the ranks of a machine share.

    Args:
        folder: where; it is made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, exist_ok=True)

    def put(self, note: Note) -> None:
        """Replace the note of a rank."""
        self._write(f"note-{note.rank}", json.dumps(asdict(note)), replaces=True)

    def notes(self) -> list[Note]:
        """Return the notes of all ranks that have written one here, in rank order."""
        found = []
        for name in self._names():
            if name.startswith("note-") and not name.endswith(".new"):
                with contextlib.suppress(OSError, ValueError, TypeError):
                    found.append(Note(**json.loads((self.folder / name).read_text("utf-8"))))
        return sorted(found, key=lambda note: note.rank)

    def post(self, name: str, text: str) -> bool:
        """Write a text, unless there is one with this name. Returns whether it was written."""
        return self._write(name, text, replaces=False)

    def read(self, name: str) -> str | None:
        """Return a text; None if there is none."""
        try:
            return (self.folder / name).read_text("utf-8")
        except OSError:
            return None

    def posts(self) -> dict[str, str]:
        """Return all texts by name, for another machine."""
        names = [name for name in self._names() if not name.startswith("note-") and "." not in name]
        return {name: text[:_MOST_TEXT] for name in names if (text := self.read(name)) is not None}

    def remove(self, gone: Collection[int] = ()) -> None:
        """Remove the folder, if every rank that wrote here has left, or is one of those that are gone."""
        if all(note.left or note.rank in gone for note in self.notes()):
            shutil.rmtree(self.folder, ignore_errors=True)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.folder)
        except OSError:  # the last rank has removed it, perhaps while this one was looking
            return []

    def _write(self, name: str, text: str, *, replaces: bool) -> bool:
        new = self.folder / f"{name}.{os.getpid()}.new"
        try:
            new.write_text(text, "utf-8")
            if replaces:
                os.replace(new, self.folder / name)
                return True
            try:
                os.link(new, self.folder / name)
                return True
            finally:
                new.unlink()
        except OSError:  # the folder is gone, the disk is full, or another rank was first
            return False


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

    def exchange(self, board: Board) -> list[Note]:
        """Send the board of this machine, add texts of the others to it, and return their notes."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="hang watch between machines", daemon=True)
            self._thread.start()
        self._outgoing = json.dumps({"notes": [asdict(note) for note in board.notes()], "posts": board.posts()})
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

    def _run(self) -> None:
        with contextlib.suppress(RuntimeError, OSError):  # who serves the store is gone
            store = self._connect()
            while not self._stop.wait(self._interval_s):
                store.set(self._own, self._outgoing)
                for key in self._others:
                    if store.check([key]):
                        self._incoming[key] = store.get(key).decode()
