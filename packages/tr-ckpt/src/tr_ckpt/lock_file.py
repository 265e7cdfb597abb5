"""Write and read the file that shows which run saves to a folder.

`.run-lock.json` is one line of JSON that names the process, and a second line with a number that changes as long as
the process lives. Who cannot ask the system about the process, as on another machine, watches the number. Clocks of
two machines are never compared.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
import stat
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tr_ckpt import files, names
from tr_ckpt.names import Process, this_process

NAME = ".run-lock.json"

_FORMAT = 1
_LARGEST_BYTES = 4096
_BEAT = "{:012d}\n"
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
# The errors of file systems without hard links; not those of a full or failing disk.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}


@dataclass(frozen=True)
class Owner:
    """The owner of a folder's lock, as its file says.

    Attributes:
        key: unique to this lock.
        process: the owner; None where the file is damaged or cannot be read.
        since: when it was locked, by the owner's clock; only for people.
        beat: changes whenever the owner updates the file.
    """

    key: str
    process: Process | None = None
    since: str = ""
    beat: tuple[object, ...] = ()

    @classmethod
    def new(cls) -> Owner:
        """Return this process as an owner, from the present time on."""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return cls(secrets.token_hex(8), this_process(), since)

    def __str__(self) -> str:
        if self.process is None:
            return f"a run that its {NAME} does not name"
        return f"process {self.process.pid} on {self.process.host} (since {self.since})"

    def content(self) -> bytes:
        """Return the first content of its file."""
        assert self.process is not None  # it is one of ours
        held = {"format": _FORMAT, "key": self.key, "since": self.since, **asdict(self.process)}
        return (json.dumps(held) + "\n" + _BEAT.format(0)).encode()


def read(path: Path) -> Owner | None:
    """Return who has locked a folder; None if there is no lock file.

    Raises:
        OSError: it cannot be read, although it is a regular file and this user has the permission.
    """
    content, status = b"", b""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
        try:
            status = _status(os.fstat(descriptor))
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                content = os.read(descriptor, _LARGEST_BYTES)
        finally:
            os.close(descriptor)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        with contextlib.suppress(FileNotFoundError):
            status = _status(os.lstat(path))
    first, _, beat = content.partition(b"\n")
    try:
        return replace(_parsed(first), beat=(beat,))
    except (ValueError, TypeError, KeyError, RecursionError):
        seen = hashlib.sha256(content).hexdigest()[:16] if content else "empty"
        return Owner(seen, beat=(content, status))


def create(path: Path, owner: Owner) -> bool:
    """Make the file of an owner atomically; return False if there is one.

    On a file system without hard links, a process that is killed in the middle may leave an empty file.

    Raises:
        OSError: it cannot be made.
    """
    fresh = names.temporary(path.parent, "lock", path.name)
    try:
        files.write_file(fresh, [owner.content()])
        try:
            files.link(fresh, path)
        except FileExistsError:
            return fresh.stat().st_nlink > 1  # NFS may report an error for a link that it made, if the answer was lost
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return _create_in_place(path, owner)
        return True
    finally:
        with contextlib.suppress(OSError):
            files.remove_file(fresh)
        names.release(fresh)


def beat(path: Path, owner: Owner, number: int) -> bool:
    """Update the owner's lock; leave the lock of another owner and return False.

    Not one of the operations of `files`: this write may be lost.

    Raises:
        OSError: it could not be written.
    """
    descriptor = os.open(path, os.O_RDWR | _FLAGS)
    try:
        first, _, _ = os.read(descriptor, _LARGEST_BYTES).partition(b"\n")
        is_ours = first == owner.content().partition(b"\n")[0]
        if is_ours:
            os.lseek(descriptor, len(first) + 1, os.SEEK_SET)
            os.write(descriptor, _BEAT.format(number).encode())
        return is_ours
    finally:
        os.close(descriptor)  # NFS shows the write to other machines only after this


def _create_in_place(path: Path, owner: Owner) -> bool:
    try:
        files.write_file(path, [owner.content()])
    except FileExistsError:
        return False
    except OSError:
        with contextlib.suppress(OSError):
            files.remove_file(path)
        raise
    return True


def _parsed(line: bytes) -> Owner:
    held = json.loads(line)
    if held["format"] != _FORMAT:
        raise ValueError("of a newer version")
    key, since, host, numbering, boot, machine = (
        _plain(held[name]) for name in ("key", "since", "host", "numbering", "boot", "machine")
    )
    if not key.isalnum():
        raise ValueError("no key")
    process = Process(host, _number(held["pid"]), numbering, _number(held["started"]), boot, machine)
    return Owner(key, process, since)


def _plain(value: object) -> str:
    """Return a text that is safe to print, whoever wrote it."""
    if not isinstance(value, str) or len(value) > 256 or not value.isprintable():
        raise ValueError("no plain text")
    return value


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError("no number")
    return value


def _status(found: os.stat_result) -> bytes:
    return repr((found.st_ino, found.st_size, found.st_mtime_ns)).encode()
