"""Read the file system: every operation that reads a checkpoint is a function of this file.

A failed read is not damage. A mount that is gone for a moment, a server that restarts or a missing permission
says nothing about the files. The operation is repeated for a while, and then raises `UnreadableError`, which ends the
restore. Only errors about the form of a path, such as `FileNotFoundError`, are raised unchanged and at once.

`READS` lists the operations; each is looked up when it is called, so a test that replaces one sees every use of it.
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open

from tr_ckpt.errors import UnreadableError
from tr_log import slow_work

logger = logging.getLogger(__name__)

T = TypeVar("T")

Identity = tuple[int, int, int]  # inode and times of a folder

READS = ("list_folder", "look", "follow", "open_file", "read_block", "open_tensors")

# Waited before each further try. Most passing errors have passed after the first wait.
DELAYS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)

# No further try starts later than this: an operation may take a minute until it fails.
LIMIT_S = 30.0

_BLOCK_BYTES = 2**20
BLOCK_BYTES = 16 * 2**20  # of what is read or written whole
_MOST_BYTES_AT_ONCE = 2**26  # a read allocates the requested size, however few bytes arrive

# These errors describe the path itself, and trying again does not change them.
_OF_FORM = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
_OF_FORM_ON_WINDOWS = (123, 1921)  # an invalid name, a link that leads to itself

_REMEDIES = {
    errno.EACCES: "give this user the right to read it",
    errno.EPERM: "give this user the right to read it",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "close programs that hold many files open",
    errno.ENOMEM: "free memory",
}

_OF_THE_SYSTEM = re.compile(r"unable to (?:open|stat|mmap) .*\((\d+)\)")

_is_patient: ContextVar[bool] = ContextVar("is_patient", default=True)


def list_folder(path: Path) -> list[str]:
    """Return the names in a folder."""
    return os.listdir(path)


def look(path: Path | str, *, follow: bool) -> os.stat_result:
    """Return the system's record of a path; of a link itself unless `follow`."""
    return os.stat(path, follow_symlinks=follow)


def follow(path: Path) -> str:
    """Return the path with all links resolved."""
    return os.path.realpath(path, strict=True)


def open_file(path: Path) -> int:
    """Open a file for reading; returns its descriptor."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))


def read_block(descriptor: int, size: int) -> bytes:
    """Read at most `size` bytes; an empty result means the end of the file."""
    return os.read(descriptor, size)


def open_tensors(path: Path) -> Any:
    """Open a safetensors file; turn the library's wrapped system errors back into `OSError`."""
    try:
        return safe_open(path, "pt", device="cpu")
    except MemoryError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM), str(path)) from error
    except RuntimeError as error:  # from torch, which opens and maps the file a second time
        text = str(error).split("\n")[0]
        if (found := _OF_THE_SYSTEM.fullmatch(text)) is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


@contextmanager
def at_once() -> Iterator[None]:
    """Give up at the first error inside the block, for reads that are not needed now."""
    token = _is_patient.set(False)
    try:
        yield
    finally:
        _is_patient.reset(token)


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder, sorted; none if the folder does not exist.

    Raises:
        UnreadableError: it cannot be listed.
    """
    try:
        return sorted(_tried(folder, lambda: list_folder(folder)))
    except OSError:
        return []


def status(path: Path, *, follow: bool = True) -> os.stat_result:
    """Return the system's record of a path; of a link itself unless `follow`.

    Raises:
        OSError: the path does not exist.
        UnreadableError: it cannot be read.
    """
    return _tried(path, lambda: look(path, follow=follow))


def identity(path: str) -> Identity | None:
    """Return what changes when a folder is replaced, or a name in it changes; None if it cannot be read now."""
    try:
        found = look(path, follow=True)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def resolved(path: Path) -> Path:
    """Return the path with all links resolved.

    Raises:
        OSError: the path does not exist.
        UnreadableError: it cannot be read.
    """
    return Path(_tried(path, lambda: follow(path)))


def is_there(path: Path, *, follow: bool = True) -> bool:
    """Whether the path exists; a link that leads nowhere does not exist, unless it is not followed.

    Raises:
        UnreadableError: it cannot be read.
    """
    return _mode(path, follow=follow) is not None


def is_folder(path: Path) -> bool:
    """Whether the path is a folder, or a link to one.

    Raises:
        UnreadableError: it cannot be read.
    """
    return stat.S_ISDIR(_mode(path) or 0)


def is_file(path: Path) -> bool:
    """Whether the path is a regular file, or a link to one.

    Raises:
        UnreadableError: it cannot be read.
    """
    return stat.S_ISREG(_mode(path) or 0)


def content(path: Path, most: int | None = None) -> bytes:
    """Return the content of a file, or its first `most` bytes.

    Raises:
        OSError: the file does not exist.
        UnreadableError: it cannot be read.
    """
    with CheckpointFile(path) as file:
        return file.read(-1 if most is None else most)


def blocks(path: Path, size: int) -> Iterator[bytes]:
    """Yield a file in pieces of at most `size` bytes.

    Raises:
        OSError: the file does not exist.
        UnreadableError: it cannot be read.
    """
    with CheckpointFile(path) as file:
        while block := file.read(size):
            yield block


def digest(path: Path) -> tuple[int, str]:
    """Return the size of a file and its SHA-256.

    Raises:
        OSError: the file does not exist.
        UnreadableError: it cannot be read.
    """
    sha256, size = hashlib.sha256(), 0
    for block in blocks(path, BLOCK_BYTES):
        sha256.update(block)
        size += len(block)
    return size, sha256.hexdigest()


class CheckpointFile(io.RawIOBase):
    """A file open for reading, which continues at the same position when a read fails and then succeeds.

    Raises:
        OSError: the file does not exist.
        UnreadableError: it cannot be read, here or in `read`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._position = 0
        self._descriptor: int | None = None
        _tried(path, self._open)

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, none at the end; all the rest if it is negative."""
        if 0 <= size <= _MOST_BYTES_AT_ONCE:
            return _tried(self._path, lambda: self._read(size))
        pieces, left = [], size
        while left and (piece := self.read(_BLOCK_BYTES if left < 0 else min(left, _BLOCK_BYTES))):
            pieces.append(piece)
            left -= len(piece) if left > 0 else 0
        return b"".join(pieces)

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer as far as the file goes, and return how far that is."""
        found = self.read(len(view := memoryview(buffer).cast("B")))
        view[: len(found)] = found
        return len(found)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Move to another position and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position}.get(whence)
        if base is None:
            base = _tried(self._path, lambda: os.lseek(self._open(), 0, os.SEEK_END))
        if base + offset < 0:
            raise OSError(errno.EINVAL, "that is before the beginning")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the position of the next read."""
        return self._position

    def close(self) -> None:
        """Close the file."""
        self._release()
        super().close()

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = open_file(self._path)
        return self._descriptor

    def _read(self, size: int) -> bytes:
        slow_work.advance()
        try:
            descriptor = self._open()
            os.lseek(descriptor, self._position, os.SEEK_SET)
            data = read_block(descriptor, size)
        except OSError:
            self._release()  # a descriptor may stay broken when the file becomes readable again
            raise
        self._position += len(data)
        return data

    def _release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def tensors(path: Path) -> Iterator[Any]:
    """Open a safetensors file with the safetensors library, which maps it.

    Raises:
        OSError: the file does not exist.
        SafetensorError: it can be read, but the library rejects its content.
        UnreadableError: it cannot be read.
    """
    try:
        opened = _tried(path, lambda: _opened(path))
    except SafetensorError:
        with CheckpointFile(path) as plain:  # finds read errors, which the library may report as SafetensorError
            plain.read(_BLOCK_BYTES)
        opened = open_tensors(path)
    with opened as file:
        yield file


def _opened(path: Path) -> Any:
    try:
        return open_tensors(path)
    except OSError as error:
        if error.errno is None:  # raised by the library, without the number
            os.close(open_file(path))
        raise


def _mode(path: Path, *, follow: bool = True) -> int | None:
    try:
        return status(path, follow=follow).st_mode
    except (OSError, ValueError) as error:
        if isinstance(error, UnreadableError):
            raise
        return None


def _tried(path: Path, operation: Callable[[], T]) -> T:
    """Run an operation that reads `path`, and repeat it for a while if it fails.

    Raises:
        OSError: an error that describes the path itself.
        UnreadableError: every try failed.
    """
    try:
        return operation()
    except OSError as error:
        if _says_something_of_the_form(error):
            raise
        if not _is_patient.get():
            raise _unreadable(path, error, 1, 0) from error
        first = error
    logger.warning("%s cannot be read (%s); trying again for a while", path, first.strerror or first)
    return _tried_again(path, operation, first)


def _tried_again(path: Path, operation: Callable[[], T], error: OSError) -> T:
    begun, tries = time.monotonic(), 1
    for delay in DELAYS_S:
        time.sleep(delay)
        tries += 1
        try:
            return operation()
        except OSError as caught:
            if _says_something_of_the_form(caught):
                raise
            error = caught
        if time.monotonic() - begun > LIMIT_S:
            break
    raise _unreadable(path, error, tries, time.monotonic() - begun) from error


def _says_something_of_the_form(error: OSError) -> bool:
    return error.errno in _OF_FORM or getattr(error, "winerror", None) in _OF_FORM_ON_WINDOWS


def _unreadable(path: Path, error: OSError, tries: int, seconds: float) -> UnreadableError:
    number = error.errno or 0
    what = f"{path} cannot be read: {error.strerror or error} ({errno.errorcode.get(number, type(error).__name__)})"
    often = f", {tries} times in {seconds:.0f} s" if tries > 1 else ""
    remedy = _REMEDIES.get(number, "check the disk or the mount")
    return UnreadableError(
        f"{what}{often}. That is not damage, so nothing else was taken in its place and nothing was removed: {remedy} "
        "and start again; to do without it, move it out of the folder"
    )
