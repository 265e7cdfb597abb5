"""Name the folders and files of checkpoints, the temporary folders of operations, and the processes that made those.

The name of a temporary folder says which process made it, so that others can check whether that one has ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import reads, untrusted
from tr_ckpt.errors import CheckpointError, UnreadableError

MANIFEST = "manifest.json"
INDEX_SUFFIX = ".shards.json"


def checkpoint_name(prefix: str, step: int) -> str:
    """Return the name of the folder of `step`."""
    return f"{prefix}-{step}"


def step_of(name: str, prefix: str) -> int | None:
    """Return the step in a checkpoint folder's name, None for any other name."""
    match = re.fullmatch(re.escape(prefix) + r"-(0|[1-9][0-9]{0,17})", name)
    return int(match[1]) if match else None


def index_name(part: str) -> str:
    """Return the name of the index of a part in shards."""
    return f"{part}{INDEX_SUFFIX}"


def shard_name(part: str, rank: int) -> str:
    """Return the name of the file with the chunks of a part that a rank wrote."""
    return f"{part}-shard-{rank}.safetensors"


def is_shard(file: str) -> bool:
    """Whether a file has such a name."""
    return re.search(r"-shard-[0-9]+\.safetensors$", file) is not None


# Parts that differ between the ranks: each rank has its own files.
PER_RANK = ("rng",)

MOST_RANKS = 10**7  # of any run; limits the length of the names of files

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def check_names(part_names: Iterable[str]) -> None:
    """Refuse names that cannot be used as file names.

    Raises:
        CheckpointError: a name has other characters, is taken, or differs from another in case alone.
    """
    seen: dict[str, str] = {Path(MANIFEST).stem: Path(MANIFEST).stem}
    for name in part_names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise CheckpointError(
                f"the name {name!r} cannot name a file; use letters, digits, '_', '-' and, not first, '.'"
            )
        if problem := untrusted.path_problem(name) or untrusted.path_problem(f"{name}-shard-{MOST_RANKS}.safetensors"):
            raise CheckpointError(f"the part name {name!r} {problem}; give another")
        if any(re.fullmatch(rf"{per_rank}-\d+", name) for per_rank in PER_RANK) or re.search(r"-shard-\d+$", name):
            raise CheckpointError(f"the part name {name!r} is that of one rank's files; give another")
        if name.endswith(".shards"):
            raise CheckpointError(f"the part name {name!r} is that of the index of a part in shards; give another")
        if (other := seen.setdefault(name.lower(), name)) != name or name == Path(MANIFEST).stem:
            raise CheckpointError(f"the part name {name!r} is taken by {other!r}; some file systems ignore case")


def check_free(taken: Iterable[str], part_names: Iterable[str]) -> None:
    """Refuse files of the caller whose names are not restorable, or belong to a part.

    Raises:
        CheckpointError: the message names the file and the part.
    """
    taken = list(taken)
    if problem := untrusted.paths_problem(taken):
        raise CheckpointError(f"write_extra made {problem}; give it another name, for nobody could restore it")
    part_names = list(part_names)
    for file in taken:
        if (owner := _owner(file, part_names)) is not None:
            raise CheckpointError(f"write_extra made {file!r}, which is where {owner} goes; give it another name")


def _owner(file: str, part_names: Iterable[str]) -> str | None:
    if file.lower() == MANIFEST.lower():
        return "the manifest"
    for name in part_names:
        of_rank = r"-\d+" if name in PER_RANK else ""
        if re.fullmatch(rf"{re.escape(name)}({of_rank}|\.shards|-shard-\d+)\.(json|safetensors)", file, re.IGNORECASE):
            return f"the part {name!r}"
    return None


def stem(name: str, rank: int) -> str:
    """Return the file name, without suffix, of a part."""
    return f"{name}-{rank}" if name in PER_RANK else name


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
    """Whether a process of this machine or container runs: it exists, is no zombie, and has the given start time.

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

# What is worked on changes within this time: its maker writes to it, or shows every 15 seconds that it lives.
STILL_S = 75.0

# What was last seen of folders of processes that this one cannot see, and since when, by the clock of this process.
_SIGNS: dict[str, tuple[object, float]] = {}

_TEMPORARY = re.compile(
    r"\.tmp-(?P<kind>writing|records|replaced|removed|pushing|fetched|lock)-(?P<target>.+)"
    r"@(?P<host>[^@]*)@(?P<pid>\d+)(?:\.(?P<numbering>[0-9a-f]+))?@[0-9a-f]+"
)


@dataclass(frozen=True)
class Temporary:
    """A temporary folder found on the disk.

    Attributes:
        path: its location.
        kind: the operation: `writing` a new checkpoint, with the `records` of what each rank wrote beside it,
            an old one `replaced` by a new one of its step, one being `removed`, a copy for `pushing`, one `fetched`
            from the Hub, or a file that will become the folder's `lock`.
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
        """Whether its maker is gone, and it is not in use by this process.

        A maker that cannot be seen is gone when it has given no sign of life for `STILL_S` since the first call.
        """
        if self.path.name in _IN_USE:  # also if this machine was renamed
            return False
        if not self.is_visible():
            return _is_still(self.path)
        return self.pid == os.getpid() or not is_alive(self.pid)

    def is_visible(self) -> bool:
        """Whether this process can check its maker, as a process of this machine or container."""
        return self.host == host_name() and self.numbering in ("", numbering())


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


def watch(directory: Path) -> None:
    """Note the temporary folders in `directory` whose makers cannot be seen: from now on they have `STILL_S`."""
    with contextlib.suppress(OSError, UnreadableError), reads.at_once():
        for left in temporaries(directory):
            if not left.is_visible():
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


def temporaries(directory: Path, listed: Iterable[str] | None = None) -> list[Temporary]:
    """Return the temporary folders in `directory`, by name; none if the directory does not exist.

    Args:
        directory: the folder to look in.
        listed: the names in it, sorted; None reads them.

    Raises:
        UnreadableError: it cannot be listed.
    """
    found = []
    for name in reads.names_in(directory) if listed is None else listed:
        if name.startswith(".tmp-") and (match := _TEMPORARY.fullmatch(name)):
            process = match["host"], int(match["pid"]), match["numbering"] or ""
            found.append(Temporary(directory / name, match["kind"], match["target"], *process))
    return found
