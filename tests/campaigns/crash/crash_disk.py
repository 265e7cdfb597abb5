"""What may be on a disk after the power was cut.

A file system promises little: the content of a file is there once the file was synced, a name in a folder once the
folder was. Everything else may be lost or kept, each change for itself, in any combination. A rename within one folder
is one change. The content that was written and not synced may be zeros, or the file ends before it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from crash_operations import Event

ROOT = 0
# Up to so many changes that are not on the disk yet, all subsets are tried; beyond, these and so many at random.
EXHAUSTIVE = 5
SAMPLED = 8

Unit = tuple[int, int]  # the number of a folder or file, and of one of its changes that are not synced
Tree = dict[str, bytes | None]  # by path: a file's content, None for a folder


@dataclass
class Folder:
    """A folder's names: those on the disk, changes since, and the view of a running system."""

    durable: dict[str, int] = field(default_factory=dict)
    pending: list[list[tuple[str, int | None]]] = field(default_factory=list)
    current: dict[str, int] = field(default_factory=dict)

    def change(self, *entries: tuple[str, int | None]) -> None:
        self.pending.append(list(entries))
        _apply(self.current, entries)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.current), []


@dataclass
class File:
    """A file's content on the disk, and writes since, each with its offset."""

    durable: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    size: int = 0

    def write(self, data: bytes) -> None:
        self.pending.append((self.size, data))
        self.size += len(data)

    def sync(self) -> None:
        self.durable = self.content(set(range(len(self.pending))), zeros=True)
        self.pending = []

    def content(self, kept: set[int], *, zeros: bool) -> bytes:
        """Return the content if of the writes only `kept` are on the disk, in full length or cut at the first lost."""
        if not self.pending:
            return self.durable
        content = bytearray(self.durable)
        for number, (offset, data) in enumerate(self.pending):
            if number not in kept and not zeros:
                break
            content[offset:] = data if number in kept else bytes(len(data))
        return bytes(content)


class Disk:
    """A file system to which recorded operations are done.

    Args:
        root: absolute path of its root; events below it count.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folders: dict[int, Folder] = {ROOT: Folder()}
        self.files: dict[int, File] = {}
        self._numbers = itertools.count(1)
        self._by_inode: dict[int, int] = {}

    @classmethod
    def of(cls, root: Path) -> Disk:
        """Return a disk that holds durably what is below `root` now."""
        disk = cls(root)
        for path in sorted(root.rglob("*")):
            parent, name = disk._place(str(path))
            number = next(disk._numbers)
            if path.is_dir():
                disk.folders[number] = Folder()
            else:
                content = path.read_bytes()
                disk.files[number] = File(content, size=len(content))
            parent.change((name, number))
            parent.sync()
        return disk

    def do(self, event: Event) -> None:
        """Do one operation."""
        if event.kind == "promise":
            return
        if event.kind in ("write", "sync"):
            file = self.files[self._by_inode[event.inode]]
            if event.kind == "write":
                file.write(event.data)
            else:
                file.sync()
        elif event.kind == "sync_folder":
            if not Path(event.path).is_relative_to(self.root):
                return
            self.folders[self._number(event.path)].sync()
        elif event.kind in ("rename", "link"):
            self._name_again(event)
        else:
            self._make_or_remove(event)

    def _make_or_remove(self, event: Event) -> None:
        parent, name = self._place(event.path)
        if event.kind.startswith("remove"):
            parent.change((name, None))
            return
        number = next(self._numbers)
        if event.kind in ("make_folder", "found_folder"):
            self.folders[number] = Folder()
        else:
            self.files[number] = File()
            self._by_inode[event.inode] = number
            if event.data:
                self.files[number].write(event.data)
        parent.change((name, number))

    def _name_again(self, event: Event) -> None:
        number = self._number(event.path)
        source, old = self._place(event.path)
        target, new = self._place(event.target)
        gone = [] if event.kind == "link" else [(old, None)]
        if source is target:
            source.change(*gone, (new, number))
        else:
            target.change((new, number))
            if gone:
                source.change(*gone)

    def _place(self, path: str) -> tuple[Folder, str]:
        head, _, name = path.rpartition("/")
        return self.folders[self._number(head)], name

    def _number(self, path: str) -> int:
        number = ROOT
        for name in Path(path).relative_to(self.root).parts:
            number = self.folders[number].current[name]
        return number

    def units(self) -> list[Unit]:
        """Return what is not synced of all that may be reached by some name."""
        reachable, ahead = set(), [ROOT]
        while ahead:
            number = ahead.pop()
            if number in reachable:
                continue
            reachable.add(number)
            if (folder := self.folders.get(number)) is not None:
                ahead += folder.durable.values()
                ahead += [entry for change in folder.pending for _, entry in change if entry is not None]
        pending = {n: (self.folders.get(n) or self.files[n]).pending for n in sorted(reachable)}
        return [(number, index) for number, changes in pending.items() for index in range(len(changes))]

    def tree(self, kept: set[Unit], *, zeros: bool) -> Tree:
        """Return what is on the disk if of all that is not synced only `kept` has reached it."""
        found: Tree = {}
        self._grow(found, ROOT, "", kept, zeros)
        return found

    def _grow(self, found: Tree, number: int, path: str, kept: set[Unit], zeros: bool) -> None:
        folder = self.folders[number]
        names = dict(folder.durable)
        for index, change in enumerate(folder.pending):
            if (number, index) in kept:
                _apply(names, change)
        for name, entry in names.items():
            below = f"{path}/{name}" if path else name
            if entry in self.folders:
                found[below] = None
                self._grow(found, entry, below, kept, zeros)
            else:
                chosen = {index for owner, index in kept if owner == entry}
                found[below] = self.files[entry].content(chosen, zeros=zeros)

    def possible(self, seed: int) -> Iterator[Tree]:
        """Yield disks that a cut may leave: all if few changes are not synced, else a sample and the extremes."""
        units = self.units()
        loses_content = any(owner in self.files for owner, _ in units)
        for kept in _subsets(units, random.Random(seed)):
            yield self.tree(kept, zeros=True)
            if loses_content:
                yield self.tree(kept, zeros=False)


def _subsets(units: list[Unit], chance: random.Random) -> Iterator[set[Unit]]:
    if len(units) <= EXHAUSTIVE:
        for size in range(len(units) + 1):
            yield from (set(chosen) for chosen in itertools.combinations(units, size))
        return
    everything = set(units)
    yield set()
    yield everything
    for unit in units:
        yield {unit}
        yield everything - {unit}
    for number in range(SAMPLED):
        share = (0.2, 0.5, 0.8)[number % 3]
        yield {unit for unit in units if chance.random() < share}


def _apply(names: dict[str, int], changes: Iterable[tuple[str, int | None]]) -> None:
    for name, number in changes:
        if number is None:
            names.pop(name, None)
        else:
            names[name] = number
