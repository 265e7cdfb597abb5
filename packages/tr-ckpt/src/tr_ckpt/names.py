"""Name the folders of checkpoints, and the temporary ones that stand for an operation under way."""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import reads
from tr_ckpt.processes import host_name, is_alive, numbering

MANIFEST = "manifest.json"

# Temporary folders that this process is using now: another instance in this process must not clear them away.
_IN_USE: set[str] = set()

_TEMPORARY = re.compile(
    r"\.tmp-(?P<kind>writing|records|replaced|removed|emptied|pushing|fetched|lock)-(?P<target>.+)"
    r"@(?P<host>[^@]*)@(?P<pid>\d+)(?:\.(?P<numbering>[0-9a-f]+))?@[0-9a-f]+"
)


@dataclass(frozen=True)
class Temporary:
    """A temporary folder found on the disk.

    Attributes:
        path: where it is.
        kind: what was going on: `writing` a new checkpoint, with the `records` of what each rank wrote beside it,
            an old one `replaced` by a new one of its step, one being `removed`, the manifest of one being
            `emptied` where it is, a copy for `pushing`, one `fetched` from the Hub, or a file
            that is about to be the folder's `lock`.
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
    """Return a new name beside `target` and note it as in use; `release` it when the folder is gone."""
    counted_in = numbering()
    process = f"{os.getpid()}.{counted_in}" if counted_in else str(os.getpid())
    name = f".tmp-{kind}-{target}@{host_name()}@{process}@{secrets.token_hex(4)}"
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
