"""Change the file system: every operation that changes it is a function of this file; explain what failed.

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
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tr_ckpt import reads
from tr_ckpt.errors import CheckpointError, SaveError, UnreadableError
from tr_ckpt.reads import BLOCK_BYTES
from tr_log import slow_work

logger = logging.getLogger(__name__)

T = TypeVar("T")

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

# A disk and its file system do the work of this many at once; more gain nothing.
_AT_ONCE = 4

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
        slow_work.advance()


def sync(descriptor: int, path: Path) -> None:
    """Wait until the content of a file has reached the disk, if its file system supports that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_sync_unsupported(error, path):
            raise
    slow_work.advance()


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


def for_each(work: Callable[[T], None], items: Iterable[T]) -> None:
    """Call `work` with each item, in a few threads of which the caller is one, and wait for the end of all.

    After a failure no further item is begun. Where no thread can be started, the caller does all.

    Raises:
        BaseException: the first failure.
    """
    ahead, failures = deque(items), list[BaseException]()

    def run() -> None:
        while ahead and not failures:
            try:
                item = ahead.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                work(item)
            except BaseException as error:  # of any kind: the caller raises it
                failures.append(error)

    threads = [threading.Thread(target=run, name="for each") for _ in range(min(len(ahead), _AT_ONCE) - 1)]
    begun = []
    try:
        for thread in threads:
            thread.start()
            begun.append(thread)
    except RuntimeError:  # as while the interpreter exits
        pass
    run()
    for thread in begun:
        thread.join()
    if failures:
        raise failures[0]


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
            for_each(_wait, [*self._held, *((None, folder) for folder in folders)])
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
    return FileRecord(*reads.digest(path))


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
    for_each(lambda each: remove_file(each), plain)  # looked up at each call
    remove_folder(path)


@contextmanager
def explain_save_errors(name: str, directory: Path) -> Iterator[None]:
    """Turn an error inside the block into one of the same kind that says what was not saved, and where.

    Args:
        name: the checkpoint.
        directory: its folder.
    """
    try:
        yield
    except UnreadableError as error:
        raise SaveError(f"{name} was not saved in {directory}: {error}") from error
    except CheckpointError as error:
        raise type(error)(f"{name} was not saved in {directory}: {error}") from error
    except OSError as error:
        if error.errno is None:  # raised by this package, and explained already
            raise
        raise OSError(error.errno, _explain(error, name, directory)) from error


def _explain(error: OSError, name: str, directory: Path) -> str:
    file = f" ({error.filename})" if error.filename else ""
    text = f"{name} was not saved in {directory}: {os.strerror(error.errno or 0)}{file}"
    remedy = _REMEDIES.get(error.errno or 0, "fix that, or save to another folder")
    if error.errno in _DISK_FULL:
        remedy += f" ({_free_space(directory)} are free)"
    return f"{text} — {remedy}"


def _free_space(directory: Path) -> str:
    try:
        return f"{shutil.disk_usage(directory).free:,} bytes"
    except OSError:
        return "unknown bytes"


_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_REMEDIES = {
    errno.ENOSPC: "free space there, keep fewer checkpoints, or save to another disk",
    errno.EDQUOT: "the quota is used up: free space there, keep fewer checkpoints, or save to another disk",
    errno.EROFS: "give a folder on a writable file system",
    errno.EACCES: "give this user the right to write there, or save to another folder",
    errno.EPERM: "give this user the right to write there, or save to another folder",
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or save to another file system",
    errno.EIO: "the disk or the connection to it is failing: look at the system's log, and save to another disk",
    errno.ESTALE: "the shared file system was changed or mounted again: check it, then start the run again",
    errno.ETIMEDOUT: "the shared file system does not answer: check it, then start the run again",
    errno.EMFILE: "raise the limit on open files (ulimit -n), or close files that this program keeps open",
    errno.ENFILE: "raise the machine's limit on open files (fs.file-max), or close files in other programs",
    errno.ENOMEM: "the machine is out of memory: use less, or save to another file system",
    errno.ENAMETOOLONG: "give an output folder with a shorter path",
    errno.EXDEV: "the existing folder belongs to a lower layer of a container's file system and cannot be moved; save "
    "to another folder, or to a volume",
    errno.EEXIST: "another program made it at the same time: give this run a folder of its own",
    errno.ENOTEMPTY: "another program put files there at the same time: give this run a folder of its own",
    errno.ENOTDIR: "a file is in the place of a folder: move it, or save to another folder",
    errno.ELOOP: "links there lead in a circle: fix them, or save to another folder",
    errno.ENOENT: "it was removed while it was being written; keep other programs and clean-up jobs away from there",
}
