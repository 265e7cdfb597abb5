"""Let one run at a time save to a folder.

The process that commits checkpoints locks the folder for the length of its run. `.run-lock.json` is one line of JSON
that names the process, and a second line with a number that changes as long as the process lives. Another run that
finds it checks whether its owner is alive. On the same machine it asks the system; otherwise it watches the number for
a while. Clocks of two machines are never compared. The lock of a dead owner is taken over; that of a living one is an
error.

To take over, a process first makes `.run-lock.json.<key>.next`, which only one process can. Then it renames that file
over the lock with this key, which only the maker does.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tr_ckpt import files, processes
from tr_ckpt.errors import FolderInUseError
from tr_ckpt.processes import Process, this_process

logger = logging.getLogger(__name__)

NAME = ".run-lock.json"

_FORMAT = 1
_LARGEST_BYTES = 4096
_BEAT = "{:012d}\n"
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
# The errors of file systems without hard links; not those of a full or failing disk.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}

# How long a living process of this machine gets to end, as after a killed launcher: its ranks save first.
ENDING_S = 30.0

_POLL_S = 0.5
# A try to make the lock fails when another process is faster, and then its lock is found. A file system that loses what
# was made fails always.
_MOST_TRIES, _TRY_AGAIN_S = 200, 0.01
_READ_TRIES, _READ_DELAY_S = 5, 0.2


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


@dataclass
class _Held:
    """A lock that this process holds.

    Attributes:
        folder: the locked folder.
        owner: as in the file.
        users: the objects that use the lock, by `id`.
        made: folders that were made for the lock, the lowest first.
        seen_s: when the file last named this process.
        lost: how the lock was lost, once that was noticed.
        is_silent: whether the last update of the file failed.
    """

    folder: Path
    owner: Owner
    users: set[int] = field(default_factory=set)
    made: list[Path] = field(default_factory=list)
    seen_s: float = field(default_factory=lambda: _now_s())
    lost: str = ""
    is_silent: bool = False

    @property
    def path(self) -> Path:
        return self.folder / NAME


_held: dict[str, _Held] = {}
_claiming = threading.Lock()  # one claim or release at a time
_dropped: list[FolderLock] = []
_beats = 0


class FolderLock:
    """The lock of a folder, as used by one object; several objects of a process share it.

    A forked process does not share the lock of its parent.

    Args:
        folder: the folder to lock; made if it does not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._has_warned = False

    def claim(self, *, patience_s: float | None = None) -> None:
        """Lock the folder, unless this process has locked it. May wait; the log says for what.

        If no lock can be made in the folder, it is used without one, and that is logged.

        Args:
            patience_s: how long a living process of this machine gets to end; None means `ENDING_S`.

        Raises:
            FolderInUseError: another run saves to it, or has taken it over.
            OSError: the folder cannot be made, or its lock cannot be read.
        """
        with _claiming:
            held = self._held()
            if held is not None:
                held.users.add(id(self))
                self.check()
                return
            made = [path for path in (self.folder, *self.folder.parents) if not os.path.lexists(path)]
            files.make_folders(self.folder)
            processes.watch(self.folder)  # before the wait for another's sign of life, which shows theirs too
            processes.begin_beating()
            owner = Owner.new()
            try:
                _acquire(self.folder, owner, ENDING_S if patience_s is None else patience_s)
            except _CannotLockError as error:
                self._warn(error)
                return
            _held[_key(self.folder)] = _Held(self.folder, owner, {id(self)}, made)
            _clear(self.folder)

    def check(self) -> None:
        """Raise if another process has taken over this process's lock; without a lock do nothing.

        Raises:
            FolderInUseError: another run has taken it over.
            OSError: it cannot be read.
        """
        held = self._held()
        if held is None:
            return
        held.lost = held.lost or _loss(held)
        if held.lost:
            raise FolderInUseError(
                f"{held.folder} {held.lost} while nothing was seen of this run, which was stopped, suspended or cut "
                "off from the file system; it saves no more there — let the other go on, and end this one"
            )

    def release(self) -> None:
        """Stop using the lock; the last user removes it."""
        with _claiming:
            self._release()

    def drop(self) -> None:
        """Release now or soon; for finalizers, which may run in the middle of a claim."""
        if not _claiming.acquire(blocking=False):
            _dropped.append(self)
            return
        try:
            self._release()
        finally:
            _claiming.release()

    def _release(self) -> None:
        held = self._held()
        if held is not None and id(self) in held.users:
            held.users.discard(id(self))
            if not held.users:
                del _held[_key(held.folder)]
                _unlock(held)

    def _held(self) -> _Held | None:
        return _held.get(_key(self.folder))

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s cannot be locked (%s), so nothing stops another run from saving there; make sure that none does",
                self.folder, error,
            )  # fmt: skip


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep runs from saving to a folder while the block runs.

    Raises:
        FolderInUseError: one does.
    """
    lock = FolderLock(folder)
    lock.claim(patience_s=0.0)
    try:
        yield
    finally:
        lock.release()


class _CannotLockError(OSError):
    """The folder takes no lock."""


def _key(folder: Path) -> str:
    return os.path.realpath(folder)


def _acquire(folder: Path, owner: Owner, patience_s: float) -> None:
    path = folder / NAME
    for _ in range(_MOST_TRIES):
        found = _read(path)
        if found is None:
            if _create(path, owner):
                return
        elif _has_ended(path, found, patience_s) and _take_over(path, found, owner, patience_s):
            logger.warning("%s was left locked by %s, which is gone: taken over", folder, found)
            return
        time.sleep(_TRY_AGAIN_S)
    raise _CannotLockError(errno.ENOENT, f"a file that was just made was gone {_MOST_TRIES} times")


def _create(path: Path, owner: Owner) -> bool:
    try:
        return create_file(path, owner)
    except FileNotFoundError:  # another machine removed our new file as the leftover of a dead process
        return False
    except OSError as error:
        raise _CannotLockError(error.errno, error.strerror) from error


def _take_over(path: Path, found: Owner, owner: Owner, patience_s: float) -> bool:
    """Replace the lock `found`, whose process is gone, by that of `owner`; False if the lock has changed."""
    following = path.with_name(f"{path.name}.{found.key}.next")
    if not _create(following, owner):
        rival = _read(following)
        if rival is not None and _has_ended(following, rival, patience_s):  # it died while it took over: finish it
            with contextlib.suppress(FileNotFoundError):
                _replace(following, path)
        return False
    now = _read(path)
    if now is None or now.key != found.key:
        with contextlib.suppress(FileNotFoundError):
            files.remove_file(following)
        return False
    with contextlib.suppress(FileNotFoundError):  # another process finished it
        _replace(following, path)
    now = _read(path)
    return now is not None and now.key == owner.key


def _replace(source: Path, target: Path) -> None:
    if os.name == "nt":  # a rename does not replace files there
        with contextlib.suppress(FileNotFoundError):
            files.remove_file(target)
    files.rename(source, target)


def _has_ended(path: Path, owner: Owner, patience_s: float) -> bool:
    """Wait until an owner is known to be gone; False if the lock changed owner in the meantime.

    Raises:
        FolderInUseError: the owner is alive.
    """
    process = owner.process
    is_visible = process is not None and processes.is_visible(process)
    if process is not None and (processes.is_gone(process) or (is_visible and process.pid == os.getpid())):
        return True  # our own process number: we wrote that lock before an `exec`
    within_s = patience_s if is_visible else processes.STILL_S
    if within_s:
        text = "%s is in use by %s: waiting up to %.0f s to see whether it %s"
        logger.warning(text, path.parent, owner, within_s, "ends" if is_visible else "is alive")
    begun_s = time.monotonic()
    while True:
        found = _read(path)
        if found is None or found.key != owner.key:
            return False
        if is_visible and process is not None and processes.is_gone(process):
            return True
        if not is_visible and found.beat != owner.beat:
            raise FolderInUseError(_refusal(path, owner))
        if time.monotonic() - begun_s >= within_s:
            if is_visible:
                raise FolderInUseError(_refusal(path, owner))
            return True
        time.sleep(_POLL_S)


def _refusal(path: Path, owner: Owner) -> str:
    return (
        f"{path.parent} is in use: {owner} saves to it, and is alive; two runs would replace and remove each other's "
        "checkpoints — give this one a folder of its own (output_dir), wait for the other, or end it"
    )


def _read(path: Path) -> Owner | None:
    """Read a lock; a momentary error is retried.

    Raises:
        OSError: the error persists.
    """
    for left in reversed(range(_READ_TRIES)):
        try:
            return read_file(path)
        except OSError as error:
            if left == 0:
                raise OSError(
                    f"whether another run saves to {path.parent} cannot be known: {error} — fix that, or save to "
                    "another folder"
                ) from error
            time.sleep(_READ_DELAY_S)
    raise AssertionError


def _clear(folder: Path) -> None:
    """Remove the leftovers of processes that ended while they were taking over an earlier lock."""
    with contextlib.suppress(OSError):
        for path in folder.glob(f"{NAME}.*.next"):
            owner = read_file(path)
            if owner is not None and owner.process is not None and processes.is_gone(owner.process):
                files.remove_file(path)


def _loss(held: _Held) -> str:
    """Describe how this process lost a lock; empty if it did not."""
    found = _read(held.path)
    if found is not None:
        if found.key != held.owner.key:
            return f"was taken over by {found}"
        held.seen_s = _now_s()
    elif _now_s() - held.seen_s > processes.STILL_S - processes.BEAT_S:
        return "was unlocked, perhaps by a run that had taken it over and has ended,"
    elif held.folder.is_dir():
        logger.warning("%s was removed from %s, and is restored", NAME, held.folder)
        with contextlib.suppress(OSError):  # then the folder has no lock, as where none can be made
            if not create_file(held.path, held.owner):
                return f"was taken over by {_read(held.path)}"
    return ""


def _unlock(held: _Held) -> None:
    with contextlib.suppress(OSError):  # then the file stays, as after a killed process
        found = read_file(held.path)
        if found is not None and found.key == held.owner.key:
            files.remove_file(held.path)
        for folder in held.made:
            if os.listdir(folder):
                break
            files.remove_folder(folder)


def _now_s() -> float:
    """Return a clock that also counts while the machine sleeps, where there is one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def beat() -> None:
    """Update the locks of this process, so that other machines see that it is alive."""
    global _beats
    _beats += 1
    for held in list(_held.values()):
        try:
            if _update(held.path, held.owner, _beats):
                held.seen_s = _now_s()
            held.is_silent = False
        except OSError as error:  # the next update may succeed
            if not held.is_silent and os.path.lexists(held.folder):
                logger.warning(
                    "%s cannot be updated (%s), which shows other machines that this run lives: if that lasts, a run "
                    "on another machine takes the folder over after %.0f s, and this one saves no more; free space "
                    "there, or look after the mount",
                    held.path, error, processes.STILL_S,
                )  # fmt: skip
            held.is_silent = True
    while _dropped:
        _dropped.pop().release()


processes.beats.append(beat)


def _forget() -> None:
    """Drop all locks after a fork: they belong to the parent."""
    global _claiming
    _held.clear()
    _claiming = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def read_file(path: Path) -> Owner | None:
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


def create_file(path: Path, owner: Owner) -> bool:
    """Make the file of an owner atomically; return False if there is one.

    On a file system without hard links, a process that is killed in the middle may leave an empty file.

    Raises:
        OSError: it cannot be made.
    """
    fresh = processes.temporary(path.parent, "lock", path.name)
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
        processes.release(fresh)


def _update(path: Path, owner: Owner, number: int) -> bool:
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
