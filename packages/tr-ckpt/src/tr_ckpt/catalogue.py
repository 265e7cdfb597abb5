"""Find the checkpoints in a folder, and check one. Nothing here changes a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import files, manifest, names
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
        if step is not None and path.is_dir():
            found[step] = Found(step, path.name, path)
    return [found[step] for step in sorted(found)]


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
    raise_if_any([damage for name in described.files if (damage := _wrong_size(folder, described, name))])


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
                same = files.record(folder / name) == described.files[name]
                damage = "" if same else f"{name} was changed after it was written: its SHA-256 is another"
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
    expected = described.files[name].bytes
    try:
        actual = (folder / name).stat().st_size
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    if actual == expected:
        return ""
    return f"{name} is {abs(actual - expected):,} bytes {'short' if actual < expected else 'too long'}"
