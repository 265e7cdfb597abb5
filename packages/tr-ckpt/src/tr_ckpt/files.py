"""Change the file system: every operation that changes it goes through the functions of this file.

`OPERATIONS` names them. Each is looked up when it is called, so a test that replaces one sees every use of it.

Some file systems that are mounted through FUSE, 9p or SMB take no fsync of a folder, or of anything. A save continues
there, with a warning. Only the order in which a power cut finds things on the disk is lost. A process that is killed
at any instant loses nothing there either.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tr_ckpt import reads
from tr_ckpt.tensor_damage import DIGITS, Section

logger = logging.getLogger(__name__)

# "Not supported", in the ways that file systems say it. EIO is none of them: then the disk is at fault.
_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY})
_OF_FOLDERS = _UNSUPPORTED | {errno.EBADF, errno.EISDIR}

# File systems, by device, of which it has been said.
_warned: set[tuple[int, bool]] = set()


def is_sync_unsupported(error: OSError, path: Path, *, of_folder: bool = False) -> bool:
    """Whether an error says no more than that this file system syncs nothing of the kind; if so, warn of it once.

    Otherwise the error is given the path, for words that name it.

    Args:
        error: what syncing raised.
        path: what was to be synced.
        of_folder: whether it is a folder.
    """
    unsupported = error.errno in (_OF_FOLDERS if of_folder else _UNSUPPORTED)
    # Where a folder can be listed, but not opened to be synced, it is not the right to read it that is missing.
    if not unsupported and not (of_folder and error.errno in (errno.EACCES, errno.EPERM) and _can_be_listed(path)):
        error.filename = error.filename or str(path)
        return False
    _warn_unsynced(error, path, of_folder=of_folder)
    return True


def warn_if_unsynced(directory: Path) -> None:
    """Find out, before anything is written, whether the folder that is or will be at `directory` can be synced.

    An error of another kind is left to whoever writes there.
    """
    existing = next((path for path in (directory, *directory.parents) if os.path.isdir(path)), None)
    if existing is None or os.name == "nt":
        return
    try:
        descriptor = os.open(existing, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        is_sync_unsupported(error, existing, of_folder=True)


def _can_be_listed(path: Path) -> bool:
    try:
        os.listdir(path)
    except OSError:
        return False
    return True


def _warn_unsynced(error: OSError, path: Path, *, of_folder: bool) -> None:
    try:
        device = os.stat(path).st_dev
    except OSError:  # what it is told apart by is of no weight
        device = -1
    if (device, of_folder) in _warned:
        return
    _warned.add((device, of_folder))
    if of_folder:
        what, harm = f"{path} cannot be synced", "may be missing"
    else:
        what, harm = f"files in {path.parent} cannot be synced", "may be damaged, which a restore notices"
    logger.warning(
        "%s on this file system (%s): after a power cut the newest checkpoints %s, so keep more than one; a process "
        "that is killed loses nothing. Checkpoints on a local disk are safe from both",
        what, os.strerror(error.errno or 0), harm,
    )  # fmt: skip


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
        sections: what a damage can be placed in, in the order of the file; empty if that is not known. Two records
            are equal whatever their sections.
    """

    bytes: int
    sha256: str
    sections: tuple[Section, ...] = field(default=(), compare=False)


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


def sync(descriptor: int, path: Path) -> None:
    """Return once what was written to a file has reached the disk, if its file system can say so."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_sync_unsupported(error, path):
            raise


def sync_folder(path: Path) -> None:
    """Return once the names in a folder have reached the disk, if its file system can say so."""
    if os.name == "nt":  # a folder has no descriptor there
        return
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if not is_sync_unsupported(error, path, of_folder=True):
            raise


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


def write_file(path: Path, blocks: Iterable[bytes | memoryview], ends: Mapping[str, int] | None = None) -> FileRecord:
    """Write a new file and wait until it is on the disk.

    The digest is taken of what is handed to the system, so that it costs no second pass.

    Args:
        path: where.
        blocks: its content.
        ends: where sections of it end, by name, in the order of the file; each at the end of a block.

    Raises:
        OSError: the file exists or cannot be written.
    """
    digest, size = hashlib.sha256(), 0
    sections, ahead = [], list((ends or {}).items())[::-1]
    descriptor = create(path)
    try:
        for block in blocks:
            data = memoryview(block).cast("B")
            for start in range(0, len(data), BLOCK_BYTES):
                piece = data[start : start + BLOCK_BYTES]
                digest.update(piece)
                with _naming(path):
                    write(descriptor, piece)
            size += len(data)
            while ahead and ahead[-1][1] <= size:
                name, end = ahead.pop()
                sections.append(Section(name, end, digest.hexdigest()[:DIGITS]))
        sync(descriptor, path)
    finally:
        os.close(descriptor)
    return FileRecord(size, digest.hexdigest(), tuple(sections))


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have an error name the file, which one of a descriptor alone does not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def seal_file(path: Path) -> FileRecord:
    """Wait until a file that somebody else wrote is on the disk, and return what it holds."""
    # Somebody else may have made it read-only; only Windows syncs nothing that is not open for writing.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        sync(descriptor, path)
    finally:
        os.close(descriptor)
    return record(path)


def record(path: Path) -> FileRecord:
    """Read a file and return its size and digest.

    Raises:
        OSError: there is no such file.
        UnreadableError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    for block in reads.blocks(path, BLOCK_BYTES):
        digest.update(block)
        size += len(block)
    return FileRecord(size, digest.hexdigest())


def make_folders(path: Path) -> None:
    """Make a folder and those above it that are missing; `settle` makes them durable."""
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        make_folder(path)
    except FileExistsError:
        if not path.is_dir():
            raise


def fsync_parents(path: Path) -> None:
    """Return once the names of a folder and of those above it, on its file system, are on the disk, whoever made them.

    A file that is on the disk is lost all the same if the folder that it is in has no name there.
    """
    device = path.stat().st_dev
    for folder in path.parents:
        if folder.stat().st_dev != device:
            return
        try:
            sync_folder(folder)
        except PermissionError:  # not to be read, so not made for this run
            continue


def remove_tree(path: Path) -> None:
    """Remove a folder and all in it, or a file; links, also in its own place, are removed and not followed."""
    if path.is_symlink() or path.is_file():
        remove_file(path)
        return
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            remove_file(Path(entry.path))
    remove_folder(path)
