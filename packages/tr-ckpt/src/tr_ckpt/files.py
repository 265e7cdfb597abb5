"""Touch the file system: every operation that changes it goes through the functions of this file.

`OPERATIONS` names them; each is looked up when it is called, so a test that replaces one sees every use of
it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

OPERATIONS = (
    "make_folder",
    "create",
    "write",
    "sync",
    "sync_folder",
    "rename",
    "link",
    "remove_file",
    "remove_folder",
)

BLOCK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class FileRecord:
    """What a file must hold.

    Attributes:
        bytes: its size.
        sha256: digest of its content, 64 lower-case hexadecimal digits.
    """

    bytes: int
    sha256: str


def make_folder(path: Path) -> None:
    """Make a folder that must not exist, in one that must."""
    os.mkdir(path)


def create(path: Path) -> int:
    """Open a file that must not exist for writing; returns its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)


def write(descriptor: int, data: memoryview) -> None:
    """Write all of `data`."""
    while data:
        data = data[os.write(descriptor, data) :]


def sync(descriptor: int) -> None:
    """Return once what was written has reached the disk."""
    os.fsync(descriptor)


def sync_folder(path: Path) -> None:
    """Return once the names in a folder have reached the disk."""
    if os.name == "nt":  # a folder has no descriptor there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give a file or folder another name on the same file system, in one instant."""
    os.rename(source, target)


def link(source: Path, target: Path) -> None:
    """Give a file a second name on the same file system."""
    os.link(source, target)


def remove_file(path: Path) -> None:
    """Remove a file."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    os.rmdir(path)


def write_file(path: Path, blocks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write a new file and wait until it is on the disk.

    The digest is taken of what is handed to the system, so that it costs no second pass.

    Raises:
        OSError: the file exists or cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    descriptor = create(path)
    try:
        for block in blocks:
            data = memoryview(block).cast("B")
            for start in range(0, len(data), BLOCK_BYTES):
                piece = data[start : start + BLOCK_BYTES]
                digest.update(piece)
                write(descriptor, piece)
            size += len(data)
        sync(descriptor)
    finally:
        os.close(descriptor)
    return FileRecord(size, digest.hexdigest())


def seal_file(path: Path) -> FileRecord:
    """Wait until a file that somebody else wrote is on the disk, and return what it holds."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)
    return record(path)


def record(path: Path) -> FileRecord:
    """Read a file and return its size and digest."""
    digest, size = hashlib.sha256(), 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing, each of them durable."""
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        make_folder(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    sync_folder(path.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it; links, also in its own place, are removed and not followed."""
    if path.is_symlink():
        remove_file(path)
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            remove_file(Path(entry.path))
    remove_folder(path)
