"""Find the checkpoints in a folder, and check one. Nothing here changes a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import files, manifest, names, plain_file, tensor_damage
from tr_ckpt.errors import DamagedCheckpointError
from tr_ckpt.manifest import Manifest


@dataclass(frozen=True)
class Found:
    """A folder with a checkpoint's name, whatever is in it.

    Attributes:
        step: the step in its name; None for a folder that was named outright, whatever it is called.
        name: its name, as messages give it.
        path: where it is: not under its name if a run ended while replacing it.
    """

    step: int | None
    name: str
    path: Path


def find(directory: Path, prefix: str) -> list[Found]:
    """Return the checkpoints in `directory` by ascending step; an absent directory has none."""
    found: dict[int, Found] = {}
    for left in names.temporaries(directory):
        step = names.step_of(left.target, prefix)
        if left.kind == "replaced" and step is not None:
            found[step] = Found(step, left.target, left.path)
    for path in directory.iterdir() if directory.is_dir() else ():
        step = names.step_of(path.name, prefix)
        if step is not None and path.is_dir() and (step not in found or not _is_being_removed(path)):
            found[step] = Found(step, path.name, path)
    return [found[step] for step in sorted(found)]


def _is_being_removed(folder: Path) -> bool:
    """Whether a folder is the rest of a checkpoint in whose place another waits: see `in_place.py`."""
    return not (folder / names.MANIFEST).exists() and not is_foreign(folder)


def by_age(directory: Path, prefix: str) -> list[Found]:
    """Return the checkpoints in `directory`, the newest last: by sequence, then by step.

    One whose manifest cannot be read may be newer than all others and comes after them, so that it is noticed when
    it is passed over. One of another program has no sequence and counts as 0: what was saved here after it, from
    whatever step on, is newer.
    """
    found = find(directory, prefix)
    ages = {each.name: age for each in found if (age := _age(each)) is not None}

    def key(each: Found) -> tuple[bool, int, int]:
        if each.name in ages:
            return False, *ages[each.name]
        return not is_foreign(each.path), 0, -1 if each.step is None else each.step

    return sorted(found, key=key)


def next_sequence(directory: Path, prefix: str) -> int:
    """Return the sequence of a checkpoint that is saved now: one higher than any in `directory`."""
    ages = (_age(found) for found in find(directory, prefix))
    return 1 + max((age[0] for age in ages if age is not None), default=0)


def is_foreign(folder: Path) -> bool:
    """Whether it looks like a checkpoint of another program: a trainer's state, and nothing that is only ours."""
    ours = (names.MANIFEST, "model.json")
    return (folder / "trainer_state.json").is_file() and not any((folder / name).exists() for name in ours)


def _age(found: Found) -> tuple[int, int] | None:
    age = manifest.read_age(found.path)
    # Under the name of another step it is a copy of something: nothing says of what age.
    return age if age is not None and found.step in (None, age[1]) else None


def check_quickly(found: Found) -> Manifest:
    """Check that a checkpoint is complete: a whole manifest, and every file has its size. Reads no content.

    Raises:
        DamagedCheckpointError: it is not; the message names every file that is wrong.
        CheckpointError: a newer version wrote it.
    """
    described = manifest.read(found.path)
    if found.step is not None and described.step != found.step:
        raise DamagedCheckpointError(f"its {names.MANIFEST} is that of step {described.step}")
    check_sizes(found.path, described)
    return described


def check_sizes(folder: Path, described: Manifest) -> None:
    """Check that every file is there and has its size.

    Raises:
        DamagedCheckpointError: the message names every file that is wrong, and by how much.
    """
    raise_if_any([wrong for name in described.files if (wrong := _wrong_size(folder, described, name))])


def verify(folder: Path, described: Manifest) -> None:
    """Read every file and compare it with the manifest.

    Raises:
        DamagedCheckpointError: the message names every file that is wrong.
    """
    raise_if_any(damages(folder, described, list(described.files)))


def damages(folder: Path, described: Manifest, wanted: list[str]) -> list[str]:
    """Read the files named and return what is wrong, one sentence a file."""
    found = []
    for name in wanted:
        damage = _wrong_size(folder, described, name)
        if not damage:
            try:
                if files.record(folder / name) != (expected := described.files[name]):
                    damage = f"{name} was changed after it was written: its SHA-256 is another"
                    damage += tensor_damage.where_changed(folder / name, expected.sections)
            except OSError as error:
                damage = f"{name} cannot be read: {error.strerror}"
        if damage:
            found.append(damage)
    return found


def raise_if_any(found: list[str]) -> None:
    """Raise `DamagedCheckpointError` with all of `found`, if there is any."""
    if found:
        raise DamagedCheckpointError("; ".join(found))


def _wrong_size(folder: Path, described: Manifest, name: str) -> str:
    record = described.files[name]
    try:
        if problem := plain_file.wrong_kind(folder, name):
            return f"{name} {problem}"
        actual = (folder / name).stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if actual == record.bytes:
        return ""
    if actual > record.bytes:
        return f"{name} is {actual - record.bytes:,} bytes too long"
    return f"{name} is {record.bytes - actual:,} bytes short{tensor_damage.where_cut(record.sections, actual)}"
