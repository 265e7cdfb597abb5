"""Name the folders of checkpoints, and the temporary ones that stand for an operation under way."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import reads

MANIFEST = "manifest.json"

# Temporary folders that this process is using now: another instance in this process must not clear them away.
_IN_USE: set[str] = set()

_TEMPORARY = re.compile(
    r"\.tmp-(?P<kind>writing|records|replaced|removed|emptied|pushing|fetched)-(?P<target>.+)"
    r"@(?P<host>[^@]*)@(?P<pid>\d+)(?:\.(?P<numbering>[0-9a-f]+))?@[0-9a-f]+"
)


@dataclass(frozen=True)
class Process:
    """A process among all machines.

    Attributes:
        host: the machine.
        pid: its number there.
        numbering: what the number counts in: each start of a machine, and each container on it, counts anew.
    """

    host: str
    pid: int
    numbering: str = ""


@dataclass(frozen=True)
class Temporary:
    """A temporary folder found on the disk.

    Attributes:
        path: where it is.
        kind: what was going on: `writing` a new checkpoint, with the `records` of what each rank wrote beside it,
            an old one `replaced` by a new one of its step, one being `removed`, the manifest of one being
            `emptied` where it is, a copy for `pushing`, one `fetched` from the Hub.
        target: the name it stands for, such as `checkpoint-30`.
        host: the machine that made it.
        pid: the process that made it.
        numbering: what the number counts in, as of `Process`; empty if that is not known.
    """

    path: Path
    kind: str
    target: str
    host: str
    pid: int
    numbering: str = ""

    def is_abandoned(self) -> bool:
        """Whether its maker is gone: not a living process of this machine or container, nor this one at work on it."""
        if self.path.name in _IN_USE:  # whatever this machine is called by now
            return False
        if self.host != _host() or self.numbering not in ("", _numbering()) or self.pid == os.getpid():
            return True
        return not _is_alive(self.pid)


def checkpoint_name(prefix: str, step: int) -> str:
    """Return the name of the folder of `step`."""
    return f"{prefix}-{step}"


def step_of(name: str, prefix: str) -> int | None:
    """Return the step in a checkpoint folder's name, None for any other name."""
    match = re.fullmatch(re.escape(prefix) + r"-(0|[1-9][0-9]{0,17})", name)
    return int(match[1]) if match else None


def temporary(directory: Path, kind: str, target: str) -> Path:
    """Return a new name beside `target` and note it as in use; `release` it when the folder is gone."""
    numbering = _numbering()
    process = f"{os.getpid()}.{numbering}" if numbering else str(os.getpid())
    name = f".tmp-{kind}-{target}@{_host()}@{process}@{secrets.token_hex(4)}"
    _IN_USE.add(name)
    return directory / name


def release(path: Path) -> None:
    """Note that this process is done with a temporary folder, whether it is still there or not."""
    _IN_USE.discard(path.name)


def temporaries(directory: Path) -> list[Temporary]:
    """Return the temporary folders in `directory`, by name; an absent directory has none.

    Raises:
        UnreadableError: it cannot be listed.
    """
    found = []
    for name in reads.names_in(directory):
        if match := _TEMPORARY.fullmatch(name):
            process = match["host"], int(match["pid"]), match["numbering"] or ""
            found.append(Temporary(directory / name, match["kind"], match["target"], *process))
    return found


def this_process() -> Process:
    """Return which one this is, for others to ask whether it `is_gone`."""
    return Process(_host(), os.getpid(), _numbering())


def is_gone(process: Process) -> bool:
    """Whether a process has ended, as far as can be told from here: nothing is known of other machines."""
    here = process.host == _host() and process.numbering == _numbering()
    return here and not _is_alive(process.pid)


def _numbering() -> str:
    try:
        # Neither alone tells: machines of one name share the first, containers of one machine the second.
        counted = os.readlink("/proc/self/ns/pid") + Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
    except (OSError, ValueError):  # not Linux
        return ""
    return hashlib.sha256(counted.encode()).hexdigest()[:8]


def _host() -> str:
    return socket.gethostname().replace("@", "_").replace("/", "_")


def _is_alive(pid: int) -> bool:
    if os.name == "nt":  # signal 0 is Ctrl-C there; a folder left behind does less harm
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
