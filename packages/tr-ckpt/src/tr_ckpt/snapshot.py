"""Copy files so that what happens to the originals later does not show: to push while training goes on."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from tr_ckpt import files


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
        except OSError:  # another file system, or one without links
            shutil.copyfile(original, place)


def copy_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Copy files that may be written again. A name that `target` has already stays as it is.

    Args:
        source: folder to take from.
        target: folder to fill.
        names: paths below `source`.
    """
    for place, original in _absent(source, target, names):
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


def _absent(source: Path, target: Path, names: Iterable[str]) -> Iterator[tuple[Path, Path]]:
    for name in names:
        place = target / name
        # Never written over: the place may be another name of a checkpoint's own file.
        if not place.exists():
            files.make_folders(place.parent)
            yield place, source / name
