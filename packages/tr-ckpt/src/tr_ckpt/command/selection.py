"""Find what the words of a command line name: the checkpoints of a folder, or one."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import catalogue, manifest, names
from tr_ckpt.catalogue import Found
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.manifest import Manifest

COMPLETE, DAMAGED, FOREIGN, UNREADABLE = "complete", "damaged", "foreign", "not readable"


@dataclass(frozen=True)
class Entry:
    """A checkpoint as a command shows it.

    Attributes:
        found: where it is.
        condition: `complete`, `damaged`, `foreign` (another program's) or `not readable` by this version.
        problem: what is the matter, in words; empty if it is complete.
        described: its manifest, if that could be read.
    """

    found: Found
    condition: str
    problem: str = ""
    described: Manifest | None = None

    @property
    def step(self) -> int | None:
        """Its step, if that is known."""
        return self.found.step if self.described is None else self.described.step


def select(directory: Path, prefix: str) -> list[Entry]:
    """Return the checkpoint that `directory` is, or those in it, the newest last.

    Raises:
        CheckpointError: there is none.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(f"{directory} {what}; give a run's output folder, or one checkpoint in it")
    one = Found(names.step_of(directory.absolute().name, prefix), directory.absolute().name, directory)
    if (directory / names.MANIFEST).exists():
        return [examine(one)]
    if found := catalogue.by_age(directory, prefix):
        return [examine(each) for each in found]
    if one.step is not None or catalogue.is_foreign(directory):  # an output folder may hold a trainer's state too
        return [examine(one)]
    raise CheckpointError(
        f"no checkpoint in {directory}: it holds neither a {names.MANIFEST} nor a folder {prefix}-<step>"
    )


def select_one(path: Path, prefix: str) -> Entry:
    """Return the checkpoint that `path` is, or the newest complete one in it.

    Raises:
        CheckpointError: there is none, or it is damaged, or another program's.
    """
    entries = select(path, prefix)
    if usable := newest(entries):
        return usable
    entry = entries[-1]
    hint = "; `trainer ckpt import` makes one of ours of it" if entry.condition == FOREIGN else ""
    raise CheckpointError(f"{entry.found.path}: {entry.problem}{hint}")


def newest(entries: list[Entry]) -> Entry | None:
    """Return the newest complete one, None if there is none."""
    return next((entry for entry in reversed(entries) if entry.condition == COMPLETE), None)


def examine(found: Found) -> Entry:
    """Look at a checkpoint, without reading the content of its files."""
    if catalogue.is_foreign(found.path):
        return Entry(found, FOREIGN, "it was written by another program, as transformers' Trainer writes them")
    described = None
    try:
        described = manifest.read(found.path)
        catalogue.check_quickly(found)
    except DamagedCheckpointError as error:
        return Entry(found, DAMAGED, str(error), described)
    except CheckpointError as error:
        return Entry(found, UNREADABLE, str(error), described)
    return Entry(found, COMPLETE, "", described)


def bytes_below(folder: Path, *, alone: bool = False) -> int:
    """Return the size of all files in a folder; `alone`: of those that have no other name, as what is pushed has."""
    total = 0
    for path in folder.rglob("*"):
        try:
            state = path.lstat()
        except OSError:  # removed meanwhile, or not to be looked at
            continue
        if stat.S_ISREG(state.st_mode) and not (alone and state.st_nlink > 1):
            total += state.st_size
    return total
