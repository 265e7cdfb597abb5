"""Copy files so that later changes of the originals have no effect: to push while training continues."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from tr_ckpt import files, manifest, names, staging
from tr_ckpt.errors import CheckpointError

_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")


def link_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Hard-link files that are never written again, such as those of a checkpoint, under `target`.

    Costs no space if the file system has hard links; otherwise the files are copied. Names that exist in `target`
    are left unchanged.

    Args:
        source: folder to take from.
        target: folder to fill.
        names: paths below `source`.
    """
    for place, original in _absent(source, target, names):
        try:
            files.link(original, place)
        except FileExistsError:
            continue  # another process made it first; never overwritten
        except OSError:  # another file system, one without links, or the file has too many links
            shutil.copyfile(original, place)


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files that may be changed or removed later. Names that exist in `target` are left unchanged.

    Args:
        source: folder to take from.
        target: folder to fill.
        names: paths below `source`.
    """
    for place, original in _absent(source, target, names):
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(original, place)


def files_below(folder: Path, skip: Iterable[str] = ()) -> list[str]:
    """Return the paths of all regular files below `folder`, without names in it that begin with `skip`.

    The name of a folder ends with a slash.
    """
    prefixes = tuple(skip)
    found: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (f"{path.name}/" if path.is_dir() else path.name).startswith(prefixes):
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
    """Return the files of a loadable model: its tensors and what the caller added, such as config.json.

    Raises:
        CheckpointError: its manifest does not exist or is damaged.
    """
    described = manifest.read(checkpoint)
    return [name for name in _WEIGHTS if name in described.files] + described.extra_files()


def link_checkpoints(copy: Path, carried: dict[str, Path], required: dict[str, Path]) -> None:
    """Link checkpoints into a copy.

    Args:
        copy: folder to fill.
        carried: checkpoints by their path in it. If one that is not `required` is gone, or is being removed, its entry
            is deleted.
        required: checkpoints that must exist.

    Raises:
        OSError: a required one cannot be linked or copied.
        CheckpointError: a required one is not a checkpoint.
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
    """Remove a copy, if it exists; after a failure the next save removes it."""
    if copy.exists():
        staging.discard(copy)
    names.release(copy)


def _absent(source: Path, target: Path, names: Iterable[str]) -> Iterator[tuple[Path, Path]]:
    for name in names:
        place = target / name
        # Never overwritten: it may be a hard link to a checkpoint's own file.
        if not place.exists():
            files.make_folders(place.parent)
            yield place, source / name
