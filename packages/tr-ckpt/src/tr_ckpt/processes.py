"""Tell one process from all others, on all machines, and whether it has ended."""

from __future__ import annotations

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")  # on Linux alone; elsewhere less is known


@dataclass(frozen=True)
class Process:
    """A process among all machines. What the system does not tell is empty, or 0.

    Attributes:
        host: the machine's name.
        pid: its number there.
        numbering: what the number counts in: each start of a machine, and each container on it, counts from 1.
        started: when it was started, in ticks since the machine was: another one may get its number later.
        boot: which start of the machine that was.
        machine: the machine, whatever it is called, or an image that several were made from.
        parent: the process that started it.
    """

    host: str
    pid: int
    numbering: str = ""
    started: int = 0
    boot: str = ""
    machine: str = ""
    parent: int = 0


def this_process() -> Process:
    """Return which one this is, for others to ask whether it `is_gone`."""
    pid = os.getpid()
    started = _state(pid)[1]
    return Process(host_name(), pid, numbering(), started, _digest(_boot()), _digest(_machine()), os.getppid())


def is_visible(process: Process) -> bool:
    """Whether it can be known from here if a process is alive: it is, or was, one of this machine or container."""
    return process.host == host_name() and process.numbering == numbering() and os.name != "nt"


def is_gone(process: Process) -> bool:
    """Whether a process has ended, as far as can be told from here: little is known of other machines."""
    if is_visible(process):
        return not is_alive(process.pid, process.started)
    boot, machine = _digest(_boot()), _digest(_machine())
    return bool(machine and boot and process.boot) and (
        (process.host, process.machine) == (host_name(), machine) and process.boot != boot
    )


def is_orphan(process: Process) -> bool:
    """Whether what started a process of this machine or container is gone, as far as the system tells."""
    parent = _state(process.pid)[2]
    return is_visible(process) and 0 not in (parent, process.parent) and parent != process.parent


def is_alive(pid: int, started: int = 0) -> bool:
    """Whether a process of this machine or container runs: it is there, no zombie, and began when it is said to have.

    Args:
        pid: its number.
        started: as of `Process`; 0 if that is not known.
    """
    if os.name == "nt":  # signal 0 is Ctrl-C there; a folder left behind does less harm
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    state, began, _ = _state(pid)
    return state not in ("Z", "X") and (not started or not began or started == began)


def numbering() -> str:
    """Return what process numbers count in here, as of `Process`."""
    try:
        # Neither alone tells: machines of one name share the first, containers of one machine the second.
        return _digest(os.readlink(_PROC / "self/ns/pid") + _boot())
    except OSError:  # not Linux
        return ""


def host_name() -> str:
    """Return the name of this machine, as it may be a part of a file's."""
    return socket.gethostname().replace("@", "_").replace("/", "_")


def _state(pid: int) -> tuple[str, int, int]:
    """Return the letter of a process's state, when it was started, and its parent, as far as the system tells."""
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()  # its name may hold anything
        return fields[0].decode("ascii"), int(fields[19]), int(fields[1])
    except (OSError, ValueError, IndexError):
        return "", 0, 0


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
