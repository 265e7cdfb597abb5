"""Name the folders and files of checkpoints, and recognise the temporary folders of operations."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import reads, untrusted
from tr_ckpt.errors import CheckpointError

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
        numbering: the scope of that number, as in `processes.Process`; empty if unknown.
    """

    path: Path
    kind: str
    target: str
    host: str
    pid: int
    numbering: str = ""


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
