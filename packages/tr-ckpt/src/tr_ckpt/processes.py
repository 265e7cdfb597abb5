"""Say which processes live, and which temporary folders they work on.

The name of a temporary folder says which process made it, so that others can check whether that one has ended. Who
cannot ask the system about a process, as on another machine, watches whether something of it changes: a process that
works shows every 15 seconds that it lives.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import reads
from tr_ckpt.errors import UnreadableError
from tr_ckpt.names import Temporary, temporaries

_PROC = Path("/proc")  # Linux only; other systems give less information


@dataclass(frozen=True)
class Process:
    """A process among those of all machines. Unknown values are empty, or 0.

    Attributes:
        host: the machine's name.
        pid: its number there.
        numbering: the scope of the number: each boot of a machine, and each container on it, counts from 1.
        started: when it was started, in clock ticks since the boot: another process may get its number later.
        boot: identifies the boot of the machine; only for people.
        machine: identifies the machine independently of its name; only for people.
    """

    host: str
    pid: int
    numbering: str = ""
    started: int = 0
    boot: str = ""
    machine: str = ""


def this_process() -> Process:
    """Return this process, so that others can check `is_gone`."""
    pid = os.getpid()
    started = _state(pid)[1]
    return Process(host_name(), pid, numbering(), started, _digest(_boot()), _digest(_machine()))


def is_visible(process: Process) -> bool:
    """Whether this process can check that one: it is, or was, a process of this machine or container."""
    return process.host == host_name() and process.numbering == numbering() and os.name != "nt"


def is_gone(process: Process) -> bool:
    """Whether a process has ended, as far as the system shows; about other machines and containers it shows nothing.

    Another boot of a machine of this name and number need not be an earlier one of this machine: machines that were
    made from one image, and containers of one name, share both.
    """
    return is_visible(process) and not is_alive(process.pid, process.started)


def is_alive(pid: int, started: int = 0) -> bool:
    """Whether a process of this machine or container runs: it exists, is not a zombie, and has the given start time.

    Args:
        pid: its number.
        started: as in `Process`; 0 if unknown.
    """
    if os.name == "nt":  # signal 0 is Ctrl-C there; a leftover folder does less harm
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    state, began = _state(pid)
    return state not in ("Z", "X") and (not started or not began or started == began)


def numbering() -> str:
    """Return the scope of process numbers here, as in `Process`."""
    try:
        # Both are needed: machines of one name share the first, containers of one machine the second.
        return _digest(os.readlink(_PROC / "self/ns/pid") + _boot())
    except OSError:  # not Linux
        return ""


def host_name() -> str:
    """Return the name of this machine, in a form that fits into a file name."""
    return socket.gethostname().replace("@", "_").replace("/", "_")


def _state(pid: int) -> tuple[str, int]:
    """Return a process's state letter and start time, as far as the system shows them."""
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()  # the name may hold any character
        return fields[0].decode("ascii"), int(fields[19])
    except (OSError, ValueError, IndexError):
        return "", 0


def _boot() -> str:
    return _line(_PROC / "sys/kernel/random/boot_id")


def _machine() -> str:
    return _line(Path("/etc/machine-id"))


def _line(path: Path) -> str:
    try:
        return path.read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8] if text else ""


# Temporary folders in use by this process, by name: another instance in this process must not remove them.
_IN_USE: dict[str, Path] = {}

# How often a process shows that it lives, and how long another waits for that. A stall of a shared file system that is
# shorter than the difference costs nothing.
BEAT_S, STILL_S = 15.0, 75.0

# What was last seen of folders of processes that this one cannot see, and since when, by the clock of this process.
_SIGNS: dict[str, tuple[object, float]] = {}


def is_abandoned(left: Temporary) -> bool:
    """Whether the maker of a temporary folder is gone, and it is not in use by this process.

    A maker that cannot be seen is gone when it has given no sign of life for `STILL_S` since the first call.
    """
    if left.path.name in _IN_USE:  # also if this machine was renamed
        return False
    if not is_maker_visible(left):
        return _is_still(left.path)
    return left.pid == os.getpid() or not is_alive(left.pid)


def is_maker_visible(left: Temporary) -> bool:
    """Whether this process can check who made a temporary folder: a process of this machine or container."""
    return left.host == host_name() and left.numbering in ("", numbering())


def temporary(directory: Path, kind: str, target: str) -> Path:
    """Return a new name beside `target` and register it as in use; `release` it when the folder is gone."""
    counted_in = numbering()
    process = f"{os.getpid()}.{counted_in}" if counted_in else str(os.getpid())
    name = f".tmp-{kind}-{target}@{host_name()}@{process}@{secrets.token_hex(4)}"
    _IN_USE[name] = directory / name
    return directory / name


def release(path: Path) -> None:
    """Mark a temporary folder as no longer in use by this process, whether it still exists or not."""
    _IN_USE.pop(path.name, None)


@contextmanager
def showing_life(path: Path) -> Iterator[None]:
    """Let `show_life` show in a block that this process works on a file, too."""
    _IN_USE[str(path)] = path
    try:
        yield
    finally:
        _IN_USE.pop(str(path), None)


def show_life() -> None:
    """Show processes of other machines and containers that the temporary folders of this one are in use."""
    for path in list(_IN_USE.values()):
        with contextlib.suppress(OSError):
            os.utime(path)


# What is done at each beat.
beats: list[Callable[[], None]] = [show_life]
_beating: threading.Thread | None = None


def begin_beating() -> None:
    """Show other machines from now on that this process lives: its locks, and the temporary folders that it uses."""
    global _beating
    if _beating is None:
        _beating = threading.Thread(target=_beat_always, name="folder lock", daemon=True)
        try:
            _beating.start()
        except RuntimeError:  # the interpreter exits soon, and nothing needs to be shown
            _beating = None


def _beat_always() -> None:
    while True:
        time.sleep(BEAT_S)
        for beat in beats:
            beat()


def _forget() -> None:
    """After a fork no thread shows life."""
    global _beating
    _beating = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def watch(directory: Path) -> None:
    """Note the temporary folders in `directory` whose makers cannot be seen: from now on they have `STILL_S`."""
    with contextlib.suppress(OSError, UnreadableError), reads.at_once():
        for left in temporaries(directory):
            if not is_maker_visible(left):
                _is_still(left.path)


def _is_still(path: Path) -> bool:
    """Whether nothing has changed in a folder for `STILL_S`, as far as this process has looked."""
    signs, now = _signs(path), time.monotonic()
    seen, since = _SIGNS.get(str(path), (None, now))
    if seen != signs:
        since = now
    _SIGNS[str(path)] = signs, since
    return now - since >= STILL_S


def _signs(path: Path) -> object:
    """Return what changes while somebody writes below a path, or touches it."""
    found = []
    for folder, _, held in os.walk(path):
        for each in (folder, *(os.path.join(folder, name) for name in held)):
            with contextlib.suppress(OSError):
                status = os.lstat(each)
                found.append((each, status.st_size, status.st_mtime_ns))
    return sorted(found)
