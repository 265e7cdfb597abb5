"""Change the file system: every operation that changes it is a function of this file.

`OPERATIONS` lists them. Each is looked up when it is called, so a test that replaces one sees every use of it.

Some file systems that are mounted through FUSE, 9p or SMB support no fsync of folders, or no fsync at all. A save
continues there, with a warning. Only a power cut can then do harm: it may find writes on the disk in another order. A
killed process loses nothing there either.
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

from tr_ckpt import background, reads

logger = logging.getLogger(__name__)

# "Not supported", in the variants that file systems return. EIO is none of them: it means that the disk fails.
_UNSUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY})
_OF_FOLDERS = _UNSUPPORTED | {errno.EBADF, errno.EISDIR}

# File systems, by device, that were warned about.
_warned: set[tuple[int, bool]] = set()


def is_sync_unsupported(error: OSError, path: Path, *, of_folder: bool = False) -> bool:
    """Whether an error only says that this file system cannot sync; if so, warn once.

    Any other error gets the path, so that messages can name it.

    Args:
        error: the error of the sync.
        path: the path to sync.
        of_folder: whether it is a folder.
    """
    unsupported = error.errno in (_OF_FOLDERS if of_folder else _UNSUPPORTED)
    # If a folder can be listed but not opened for syncing, the cause is not a missing permission to read.
    if not unsupported and not (of_folder and error.errno in (errno.EACCES, errno.EPERM) and _can_be_listed(path)):
        error.filename = error.filename or str(path)
        return False
    _warn_unsynced(error, path, of_folder=of_folder)
    return True


def warn_if_unsynced(directory: Path) -> None:
    """Check before the first write whether the folder that is or will be at `directory` can be synced.

    Other errors are left to the later write.
    """
    existing = next((path for path in (directory, *directory.parents) if os.path.isdir(path)), None)
    if existing is None or os.name == "nt":
        return
    try:
        _fsync_folder(existing)
    except OSError as error:
        is_sync_unsupported(error, existing, of_folder=True)


def _fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _can_be_listed(path: Path) -> bool:
    try:
        os.listdir(path)
    except OSError:
        return False
    return True


def _warn_unsynced(error: OSError, path: Path, *, of_folder: bool) -> None:
    try:
        device = os.stat(path).st_dev
    except OSError:  # the device only decides how often the warning appears
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

_MOST_OPEN = 64  # files of one save; a process may open few

# Enough to locate damage: the full digest decides whether a file is intact.
DIGITS = 16

HEADER = ""  # no tensor has this name


@dataclass(frozen=True)
class Section:
    """A range of a file: its header, or one tensor.

    The digest of the whole file passes through the digests at the ends of its sections, so they cost nothing. The
    first that differs shows where a file was changed; changes after that position cannot be located.

    Attributes:
        name: of the tensor; `HEADER` for the bytes before the first.
        end: its end, in bytes from the beginning of the file.
        digest: first digits of the SHA-256 of the file up to that position.
    """

    name: str
    end: int
    digest: str


@dataclass(frozen=True)
class FileRecord:
    """The expected content of a file.

    Attributes:
        bytes: its size.
        sha256: digest of its content, 64 lower-case hexadecimal digits.
        sections: the parts of the file in order, to locate damage in; empty if unknown. Equality of two records
            ignores them.
    """

    bytes: int
    sha256: str
    sections: tuple[Section, ...] = field(default=(), compare=False)


def make_folder(path: Path) -> None:
    """Make a folder that must not exist; its parent must."""
    os.mkdir(path)


def create(path: Path) -> int:
    """Create a file that must not exist, and return its descriptor for writing."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)


def write(descriptor: int, data: memoryview) -> None:
    """Write all of `data`."""
    while data:
        data = data[os.write(descriptor, data) :]


def sync(descriptor: int, path: Path) -> None:
    """Wait until the content of a file has reached the disk, if its file system supports that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_sync_unsupported(error, path):
            raise


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder have reached the disk, if its file system supports that."""
    if os.name == "nt":  # a folder has no descriptor there
        return
    try:
        _fsync_folder(path)
    except OSError as error:
        if not is_sync_unsupported(error, path, of_folder=True):
            raise


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder on the same file system, atomically.

    Raises:
        OSError: it failed; of a folder that overlayfs cannot move (EXDEV), the text says so.
    """
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        text = (
            "it cannot be moved, as it belongs to a lower layer of a container's file system, or to another file "
            "system; give a folder of this container, or a volume"
        )
        raise OSError(error.errno, text, str(source), None, str(target)) from error


def link(source: Path, target: Path) -> None:
    """Give a file a second name on the same file system."""
    os.link(source, target)


def remove_file(path: Path) -> None:
    """Remove a file."""
    os.unlink(path)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    os.rmdir(path)


class Unsynced:
    """Written files that are synced together: the system then waits for the disk about once, not once a file."""

    def __init__(self) -> None:
        self._held: list[tuple[int, Path]] = []
        self._is_given_up = False

    def give_up(self) -> None:
        """Have the file that is being written end with an error soon, and no other begin."""
        self._is_given_up = True

    def check(self) -> None:
        """Raise if the files are given up.

        Raises:
            OSError: they are.
        """
        if self._is_given_up:
            raise OSError("the save was given up")

    def add(self, descriptor: int, path: Path) -> None:
        """Take over the descriptor of a file: an error of the disk is reported to an open one."""
        self._held.append((descriptor, path))
        if len(self._held) >= _MOST_OPEN:
            self.sync()

    def sync(self, *folders: Path) -> None:
        """Wait until these files, and the names in `folders`, are on the disk."""
        try:
            background.for_each(_wait, [*self._held, *((None, folder) for folder in folders)])
        finally:
            self.close()

    def close(self) -> None:
        """Close the files, whether they are synced or not."""
        while self._held:
            os.close(self._held.pop()[0])


def _wait(written: tuple[int | None, Path]) -> None:
    descriptor, path = written
    if descriptor is None:
        sync_folder(path)
    else:
        sync(descriptor, path)


def write_file(
    path: Path,
    blocks: Iterable[bytes | memoryview],
    ends: Mapping[str, int] | None = None,
    unsynced: Unsynced | None = None,
) -> FileRecord:
    """Write a new file and wait until it is on the disk.

    The digest is computed while writing, so that the file is not read again.

    Args:
        path: the file.
        blocks: its content.
        ends: the ends of its sections, by name, in the order of the file; each at the end of a block.
        unsynced: syncs it later, with others; None waits here.

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
                if unsynced is not None:
                    unsynced.check()
                with _naming(path):
                    write(descriptor, piece)
            size += len(data)
            while ahead and ahead[-1][1] <= size:
                name, end = ahead.pop()
                sections.append(Section(name, end, digest.hexdigest()[:DIGITS]))
    except BaseException:
        os.close(descriptor)
        raise
    _sync_and_close(descriptor, path, unsynced)
    return FileRecord(size, digest.hexdigest(), tuple(sections))


def _sync_and_close(descriptor: int, path: Path, unsynced: Unsynced | None) -> None:
    if unsynced is not None:
        unsynced.add(descriptor, path)
        return
    try:
        sync(descriptor, path)
    finally:
        os.close(descriptor)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name to an error of its descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def seal_file(path: Path, unsynced: Unsynced | None = None) -> FileRecord:
    """Wait until a file of another writer is on the disk, unless `unsynced` does; return its size and digest."""
    # The file may be read-only; only Windows needs it open for writing to sync it.
    _sync_and_close(os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY), path, unsynced)
    return record(path)


def record(path: Path) -> FileRecord:
    """Read a file and return its size and digest.

    Raises:
        OSError: the file does not exist.
        UnreadableError: it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    for block in reads.blocks(path, BLOCK_BYTES):
        digest.update(block)
        size += len(block)
    return FileRecord(size, digest.hexdigest())


def make_folders(path: Path) -> None:
    """Make a folder and its missing parents; `fsync_parents` makes them durable."""
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        make_folder(path)
    except FileExistsError:
        if not path.is_dir():
            raise


def fsync_parents(path: Path) -> None:
    """Wait until the names of a folder and of its parents on the same file system are on the disk, whoever made them.

    A synced file is lost all the same if the name of its folder is not on the disk.
    """
    device = path.stat().st_dev
    for folder in path.parents:
        if folder.stat().st_dev != device:
            return
        try:
            sync_folder(folder)
        except PermissionError:  # an unreadable folder was not made by this run
            continue


def remove_tree(path: Path) -> None:
    """Remove a folder with its content, or a file. Links are removed and never followed."""
    if path.is_symlink() or path.is_file():
        remove_file(path)
        return
    plain = []
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            plain.append(Path(entry.path))
    background.for_each(lambda each: remove_file(each), plain)  # looked up at each call
    remove_folder(path)
