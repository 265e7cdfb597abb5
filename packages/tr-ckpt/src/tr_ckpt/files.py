"""Change the file system: every operation that changes it is a function of this file.

`OPERATIONS` lists them. Each is looked up when it is called, so a test that replaces one sees every use of it.
`explain_save_errors` says of a failed save what was not saved, why, and what to do about it.

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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tr_ckpt import reads
from tr_ckpt.errors import SaveError, UnreadableError

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
    """Rename a file or folder on the same file system, atomically."""
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

    The digest is computed while writing, so that the file is not read again.

    Args:
        path: the file.
        blocks: its content.
        ends: the ends of its sections, by name, in the order of the file; each at the end of a block.

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
    """Add the file's name to an error of its descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def seal_file(path: Path) -> FileRecord:
    """Wait until a file of another writer is on the disk, and return its size and digest."""
    # The file may be read-only; only Windows needs it open for writing to sync it.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        sync(descriptor, path)
    finally:
        os.close(descriptor)
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
    for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            remove_tree(Path(entry.path))
        else:
            remove_file(Path(entry.path))
    remove_folder(path)


@contextmanager
def explain_save_errors(name: str, directory: Path) -> Iterator[None]:
    """Turn an OS error inside the block into one of the same kind that says what was not saved.

    Args:
        name: the checkpoint.
        directory: its folder.
    """
    try:
        yield
    except UnreadableError as error:
        raise SaveError(f"{name} was not saved in {directory}: {error}") from error
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
