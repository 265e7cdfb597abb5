"""Copy files so that what happens to the originals later does not show: to push while training goes on."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from tr_ckpt import files, manifest, names, staging
from tr_ckpt.errors import CheckpointError

_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


def link_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Give files that are never written again, as those of a checkpoint are, a second name under `target`.

    Costs no space where the file system has hard links; elsewhere they are copied. A name that `target` has
    already stays as it is.

    Args:
        source: folder to take from.
        target: folder to fill.
        names: paths below `source`.
    """
    for place, original in _absent(source, target, names):
        try:
            files.link(original, place)
        except FileExistsError:
            continue  # somebody else was faster; never written over
        except OSError:  # another file system, one without links, or one that has too many to the file
            shutil.copyfile(original, place)


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files that may be written again, or go meanwhile. A name that `target` has already stays as it is.

    Args:
        source: folder to take from.
        target: folder to fill.
        names: paths below `source`.
    """
    for place, original in _absent(source, target, names):
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(original, place)


def files_below(folder: Path, skip: Iterable[str] = ()) -> list[str]:
    """Return the paths of all plain files below `folder`, but for names in it that begin with `skip`."""
    prefixes = tuple(skip)
    found: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(prefixes):
            continue
        if path.is_dir():
            found += [f"{path.name}/{below}" for below in files_below(path)]
        elif path.is_file():
            found.append(path.name)
    return found


def size(folder: Path) -> int:
    """Return how many bytes the files below `folder` have."""
    return sum((folder / name).stat().st_size for name in files_below(folder))


def model_files(checkpoint: Path) -> list[str]:
    """Return what makes a loadable model: its tensors and what the caller added, as config.json and a tokenizer.

    Raises:
        CheckpointError: it has no manifest, or a damaged one.
    """
    described = manifest.read(checkpoint)
    return [name for name in _WEIGHTS if name in described.files] + described.extra_files()


def link_checkpoints(copy: Path, carried: dict[str, Path], required: dict[str, Path]) -> None:
    """Link checkpoints into a copy.

    Args:
        copy: folder to fill.
        carried: checkpoints by their place in it; one that is not `required` and is gone, or is being removed, is taken
            out.
        required: those whose absence is an error.

    Raises:
        OSError: one of those cannot be linked or copied.
        CheckpointError: one of those is no checkpoint.
    """
    for place, folder in list(carried.items()):
        try:
            manifest.read(folder)
            link_files(folder, copy / place, files_below(folder))
        except (OSError, CheckpointError):
            if place in required:
                raise
            del carried[place]
            if (copy / place).exists():
                files.remove_tree(copy / place)


def discard(copy: Path) -> None:
    """Remove a copy, if it is there; a failure leaves it to the next save."""
    if copy.exists():
        staging.discard(copy)
    names.release(copy)


def _absent(source: Path, target: Path, names: Iterable[str]) -> Iterator[tuple[Path, Path]]:
    for name in names:
        place = target / name
        # Never written over: the place may be another name of a checkpoint's own file.
        if not place.exists():
            files.make_folders(place.parent)
            yield place, source / name
