"""Find the checkpoints in a folder, check one, and name the damage. This file changes nothing on the disk."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import manifest, names, reads, untrusted
from tr_ckpt.errors import Damage, DamagedCheckpointError, UnreadableError
from tr_ckpt.files import HEADER, Section
from tr_ckpt.manifest import Manifest
from tr_ckpt.reads import Identity

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 2**20

# Sequence and step: of two checkpoints of this format the one with the higher age is the newer.
Age = tuple[int, int]


@dataclass(frozen=True)
class Found:
    """A folder named like a checkpoint; its content is not checked.

    Attributes:
        step: the step in its name; None for a folder that the caller named.
        name: its name in messages.
        path: its location. Its name differs if a run was killed while it replaced the checkpoint.
    """

    step: int | None
    name: str
    path: Path


@dataclass
class Entry:
    """What was read of a checkpoint, which holds until its folder changes.

    Attributes:
        found: the checkpoint.
        identity: of its folder, from before the rest was read.
        age: from its manifest.
        is_complete: whether every file had its size.
    """

    found: Found
    identity: Identity
    age: Age
    is_complete: bool = False


class Seen:
    """What was read earlier of the checkpoints in a folder, so that a save does not read all of them again.

    A folder that was replaced, or in which a name changed, is read again. A file that was changed in place is not
    noticed here.

    Attributes:
        entries: by name.
        checked: names of those whose files were looked at for the last limit.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.checked: set[str] = set()

    def look(self, directory: Path, prefix: str) -> tuple[list[Entry], list[Found]]:
        """Return what did not change, and the checkpoints to read. Lists the folder, and reads no file.

        Raises:
            UnreadableError: the directory cannot be read.
        """
        unchanged: list[Entry] = []
        others: list[str] = []
        listed = reads.names_in(directory)
        is_usual = not any(left.kind == "replaced" for left in names.temporaries(directory, listed))
        for name in listed:
            entry = self.entries.get(name) if is_usual else None
            if entry is not None and reads.identity(f"{directory}{os.sep}{name}") == entry.identity:
                unchanged.append(entry)
            else:
                others.append(name)
        if len(self.entries) > len(unchanged):
            there = set(listed)
            self.entries = {name: entry for name, entry in self.entries.items() if name in there}
        return unchanged, find(directory, prefix, others)

    def note(self, found: Found, identity: Identity | None, age: Age | None, *, is_complete: bool = False) -> None:
        """Keep what was read of a checkpoint after its `identity`."""
        if age is None or identity is None or found.path.name != found.name:
            self.entries.pop(found.name, None)
        else:
            self.entries[found.name] = Entry(found, identity, age, is_complete)


def find(directory: Path, prefix: str, listed: Iterable[str] | None = None) -> list[Found]:
    """Return the checkpoints in `directory` by ascending step; none if the directory does not exist.

    Args:
        directory: the folder to look in.
        prefix: the first part of the names of checkpoints.
        listed: the names in it that count, sorted; None reads them.

    Raises:
        UnreadableError: the directory cannot be read.
    """
    found: dict[int, Found] = {}
    listed = reads.names_in(directory) if listed is None else listed
    for left in names.temporaries(directory, listed):
        step = names.step_of(left.target, prefix)
        if left.kind == "replaced" and step is not None:
            found[step] = Found(step, left.target, left.path)
    for name in listed:
        if (step := names.step_of(name, prefix)) is None:
            continue
        path = directory / name
        if reads.is_folder(path) and (step not in found or not _is_being_removed(path)):
            found[step] = Found(step, name, path)
    return [found[step] for step in sorted(found)]


def _is_being_removed(folder: Path) -> bool:
    """Whether a newer checkpoint waits to take the place of this folder: see `staging.py`."""
    return not reads.is_there(folder / names.MANIFEST) and not is_foreign(folder)


def by_age(directory: Path, prefix: str) -> list[Found]:
    """Return the checkpoints in `directory`, the newest last: by sequence, then by step.

    A checkpoint whose manifest cannot be read may be the newest, so it comes last: a restore then reports that it
    skips it. A checkpoint of another program counts as sequence 0: every save of this package is newer.

    Raises:
        UnreadableError: the order cannot be determined.
    """
    found = find(directory, prefix)
    ages = {each.name: age for each in found if (age := _age(each)) is not None}

    def key(each: Found) -> tuple[bool, int, int]:
        if each.name in ages:
            return False, *ages[each.name]
        return not is_foreign(each.path), 0, -1 if each.step is None else each.step

    return sorted(found, key=key)


def next_sequence(directory: Path, prefix: str, seen: Seen | None = None) -> int:
    """Return the sequence of the next save: one higher than any in `directory`.

    Args:
        directory: the folder to save to.
        prefix: the first part of the names of checkpoints.
        seen: what was read earlier, also for checkpoints that cannot be read at present. Updated in place.

    Raises:
        UnreadableError: a checkpoint without a known age cannot be read; its sequence could be any.
    """
    seen = Seen() if seen is None else seen
    unchanged, others = seen.look(directory, prefix)
    ages = [entry.age for entry in unchanged] + [_age_or_seen(found, seen) for found in others]
    return 1 + max((age[0] for age in ages if age is not None), default=0)


def _age_or_seen(found: Found, seen: Seen) -> Age | None:
    identity, known = reads.identity(str(found.path)), seen.entries.get(found.name)
    try:
        with reads.at_once() if known is not None else nullcontext():
            age = _age(found)
    except UnreadableError:
        if known is None:
            raise
        return known.age
    seen.note(found, identity, age)
    return age


def is_foreign(folder: Path) -> bool:
    """Whether this looks like a checkpoint of another program: a trainer's state, and no file that only we write."""
    ours = (names.MANIFEST, "model.json")
    return reads.is_file(folder / "trainer_state.json") and not any(reads.is_there(folder / name) for name in ours)


def _age(found: Found) -> Age | None:
    age = manifest.read_age(found.path)
    # A folder under the name of another step is a copy: its age is unknown.
    return age if age is not None and found.step in (None, age[1]) else None


def check_quickly(found: Found, *, with_sections: bool = True) -> Manifest:
    """Check that a checkpoint is complete: a valid manifest, and every file has its size. Reads no content.

    Without the sections of its files a message does not say which tensor is cut.

    Raises:
        DamagedCheckpointError: it is incomplete; the message names every wrong file, and by how many bytes.
        CheckpointError: a newer version wrote it.
        UnreadableError: it cannot be read.
    """
    described = manifest.read(found.path, with_sections=with_sections)
    if found.step is not None and described.step != found.step:
        text = f"its {names.MANIFEST} is that of step {described.step}"
        raise DamagedCheckpointError(damages=[Damage(names.MANIFEST, "content", text)])
    raise_if_damaged(_damages(lambda name: _wrong_size(found.path, described, name), described.files))
    return described


def verify(folder: Path, described: Manifest) -> None:
    """Read every file and compare it with the manifest.

    Raises:
        DamagedCheckpointError: the message names every wrong file.
        UnreadableError: a file cannot be read.
    """
    raise_if_damaged(damages(folder, described, described.files))


def damages(folder: Path, described: Manifest, wanted: Iterable[str]) -> list[Damage]:
    """Read the `wanted` files and return what is wrong with them.

    Raises:
        UnreadableError: a file cannot be read.
    """
    return _damages(
        lambda name: _wrong_size(folder, described, name) or _wrong_content(folder, described, name), wanted
    )


def _damages(wrong: Callable[[str], str], wanted: Iterable[str]) -> list[Damage]:
    return [Damage(name, "content", f"{name} {text}") for name in wanted if (text := wrong(name))]


def raise_if_damaged(found: Sequence[Damage]) -> None:
    """Raise `DamagedCheckpointError` with all of `found`, if there are any."""
    if found:
        raise DamagedCheckpointError(damages=found)


def _wrong_size(folder: Path, described: Manifest, name: str) -> str:
    record = described.files[name]
    try:
        if problem := untrusted.file_kind_problem(folder, name):
            return problem
        actual = reads.status(folder / name).st_size
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if actual == record.bytes:
        return ""
    if actual > record.bytes:
        return f"is {actual - record.bytes:,} bytes too long"
    return f"is {record.bytes - actual:,} bytes short{_where_cut(record.sections, actual)}"


def _wrong_content(folder: Path, described: Manifest, name: str) -> str:
    expected = described.files[name]
    try:
        if reads.digest(folder / name) == (expected.bytes, expected.sha256):
            return ""
        if reads.digest(folder / name) == (expected.bytes, expected.sha256):
            logger.warning("two reads of %s differ: check the disk, the mount and the memory", folder / name)
            return ""
        changed = "was changed after it was written: its SHA-256 differs"
        return changed + _where_changed(folder / name, expected.sections)
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _where_cut(sections: Iterable[Section], size: int) -> str:
    """Return where a file of `size` bytes, which should be longer, was cut; empty if unknown."""
    start = 0
    for section in sections:
        if section.end > size:
            return f": cut in {_name(section, start)}"
        start = section.end
    return ""


def _where_changed(path: Path, sections: Iterable[Section]) -> str:
    """Return where a file of the right length was changed first; empty if unknown. Reads the file.

    Raises:
        OSError: the file does not exist.
        UnreadableError: it cannot be read.
    """
    digest, start = hashlib.sha256(), 0
    with reads.CheckpointFile(path) as file:
        for section in sections:
            left = section.end - start
            while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
                digest.update(block)
                left -= len(block)
            if not digest.hexdigest().startswith(section.digest):
                return f", first in {_name(section, start)}"
            start = section.end
    return ""


def _name(section: Section, start: int) -> str:
    what = "its header" if section.name == HEADER else f"tensor {section.name}"
    return f"{what} (bytes {start:,} to {section.end:,})"
