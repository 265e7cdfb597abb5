"""Name the folders of checkpoints, and the temporary folders of operations under way."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import reads
from tr_ckpt.processes import host_name, is_alive, numbering

MANIFEST = "manifest.json"

# Temporary folders in use by this process: another instance in this process must not remove them.
_IN_USE: set[str] = set()

_TEMPORARY = re.compile(
    r"\.tmp-(?P<kind>writing|records|replaced|removed|emptied|pushing|fetched|lock)-(?P<target>.+)"
    r"@(?P<host>[^@]*)@(?P<pid>\d+)(?:\.(?P<numbering>[0-9a-f]+))?@[0-9a-f]+"
)


@dataclass(frozen=True)
class Temporary:
    """A temporary folder found on the disk.

    Attributes:
        path: its location.
        kind: the operation: `writing` a new checkpoint, with the `records` of what each rank wrote beside it,
            an old one `replaced` by a new one of its step, one being `removed`, the manifest of one being
            `emptied` in place, a copy for `pushing`, one `fetched` from the Hub, or a file
            that will become the folder's `lock`.
        target: the name that it belongs to, such as `checkpoint-30`.
        host: the machine that made it.
        pid: the process that made it.
        numbering: the scope of that number, as in `Process`; empty if unknown.
    """

    path: Path
    kind: str
    target: str
    host: str
    pid: int
    numbering: str = ""

    def is_abandoned(self) -> bool:
        """Whether its maker is gone: no living process of this machine or container, and not in use by this one."""
        if self.path.name in _IN_USE:  # also if this machine was renamed
            return False
        if self.host != host_name() or self.numbering not in ("", numbering()) or self.pid == os.getpid():
            return True
        return not is_alive(self.pid)


def checkpoint_name(prefix: str, step: int) -> str:
    """Return the name of the folder of `step`."""
    return f"{prefix}-{step}"


def step_of(name: str, prefix: str) -> int | None:
    """Return the step in a checkpoint folder's name, None for any other name."""
    match = re.fullmatch(re.escape(prefix) + r"-(0|[1-9][0-9]{0,17})", name)
    return int(match[1]) if match else None


def temporary(directory: Path, kind: str, target: str) -> Path:
    """Return a new name beside `target` and register it as in use; `release` it when the folder is gone."""
    counted_in = numbering()
    process = f"{os.getpid()}.{counted_in}" if counted_in else str(os.getpid())
    name = f".tmp-{kind}-{target}@{host_name()}@{process}@{secrets.token_hex(4)}"
    _IN_USE.add(name)
    return directory / name


def release(path: Path) -> None:
    """Mark a temporary folder as no longer in use by this process, whether it still exists or not."""
    _IN_USE.discard(path.name)


def temporaries(directory: Path) -> list[Temporary]:
    """Return the temporary folders in `directory`, by name; none if the directory does not exist.

    Raises:
        UnreadableError: it cannot be listed.
    """
    found = []
    for name in reads.names_in(directory):
        if match := _TEMPORARY.fullmatch(name):
            process = match["host"], int(match["pid"]), match["numbering"] or ""
            found.append(Temporary(directory / name, match["kind"], match["target"], *process))
    return found
