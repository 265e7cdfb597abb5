"""Copy files so that later changes of the originals have no effect: to push while training continues."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from tr_ckpt import files, manifest, names, processes, staging
from tr_ckpt.errors import CheckpointError

_WEIGHTS = ("model.safetensors", "adapter_model.safetensors")

# What may hold secrets, or tells of this machine: private names, trackers' folders, what crashes and shells leave.
TRACKERS = ("wandb", "mlruns", "swanlog")
PRIVATE_NAMES = (".*", "_*", "hang-*.txt", "core.[0-9]*", "core.*.[0-9]*", "nohup.out", "*.lock", *TRACKERS)

# What a run writes for itself: it names this machine, its folders and the script.
OWN_NAMES = ("events.jsonl", "events-*.jsonl", "report.html", "profile")

# What is not pushed even as a part of a checkpoint. The Hub takes nothing in the last two.
NEVER_PUSHED = (".env", ".env.*", ".netrc", "_netrc", ".git-credentials", ".ssh", ".aws", ".git", ".cache")

_OWN = "own"


def link_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Hard-link files that are never written again, such as those of a checkpoint, under `target`.

    Costs no space if the file system has hard links; otherwise the files are copied. Names that exist in `target`
    are left unchanged.

    Args:
        source: folder to take from.
        target: folder to fill.
        names: paths below `source`.

    Raises:
        OSError: one cannot be linked or copied.
        CheckpointError: one is not in `source`, but elsewhere, by a link.
    """
    root = Path(os.path.realpath(source))
    for place, original in _absent(source, target, names):
        real = Path(os.path.realpath(original))
        if not real.is_relative_to(root):
            raise CheckpointError(f"{original} is a link out of {source.name}, which nothing of a checkpoint is")
        try:
            files.link(real if original.is_symlink() else original, place)
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


def files_below(folder: Path) -> list[str]:
    """Return the paths of all files below `folder`; links to folders, and links out of it, are not followed."""
    return [name for name, why in _look_below(folder, lambda path: "") if not why]


def public_files(folder: Path, prefix: str) -> tuple[list[str], list[str]]:
    """Return the paths of the files below `folder` that may be seen by others, and what else it holds, with the reason.

    Left out at every depth, and not listed, is what a run writes for itself.

    Args:
        folder: the folder to look in.
        prefix: the first part of the names of checkpoints.
    """

    def leave_out(path: Path) -> str:
        if is_own(path.name, prefix):
            return _OWN
        return "a core dump" if path.name == "core" and path.is_file() else why_private(path.name)

    found = list(_look_below(folder, leave_out))
    left_out = [f"{name} ({why})" for name, why in found if why not in ("", _OWN)]
    return [name for name, why in found if not why], left_out


def is_own(name: str, prefix: str) -> bool:
    """Whether a run writes a file or folder of this name for itself, or as a checkpoint."""
    return name.startswith((".tmp-", ".run-lock", f"{prefix}-")) or _matches(name, OWN_NAMES)


def why_private(name: str) -> str:
    """Return why a file or folder of this name is not for others; empty if it is."""
    is_module = name.startswith("__") and name.endswith("__.py")  # of a package of a model's code
    return "a private name" if _matches(name, PRIVATE_NAMES) and not is_module else ""


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _look_below(folder: Path, leave_out: Callable[[Path], str]) -> Iterator[tuple[str, str]]:
    """Yield each file below a folder, and what is not looked into, with the reason; files that are taken have none."""
    root = Path(os.path.realpath(folder))
    waiting = [root] if root.is_dir() else []
    while waiting:
        for path in sorted(waiting.pop(0).iterdir()):
            name = path.relative_to(root).as_posix()
            why = leave_out(path) or _why_not(path, root)
            if why or not path.is_dir():
                yield name, why
            else:
                waiting.append(path)


def _why_not(path: Path, root: Path) -> str:
    """Return why a file or folder cannot be taken, whatever its name is; empty if it can."""
    if not path.is_symlink():
        return "" if path.is_dir() or path.is_file() else "no regular file"
    target = Path(os.path.realpath(path))  # raises nothing where links form a circle
    if target.is_dir():
        return "a link to a folder"
    if not target.is_file():
        return "a link to nothing"
    if not target.is_relative_to(root):
        return "a link out of the folder"
    parts = target.relative_to(root).parts
    is_private = any(why_private(part) or _matches(part, OWN_NAMES) for part in parts) or parts[-1] == "core"
    return "a link to a private name" if is_private else ""


def size(folder: Path) -> int:
    """Return how many bytes the files below `folder` have."""
    return sum((folder / name).stat().st_size for name in files_below(folder))


def model_files(checkpoint: Path) -> list[str]:
    """Return the files of a loadable model: its tensors and what the caller added, such as config.json.

    Raises:
        CheckpointError: its manifest does not exist or is damaged.
    """
    described = manifest.read(checkpoint)
    public = [name for name in described.extra_files() if not any(map(why_private, name.split("/")))]
    return [name for name in _WEIGHTS if name in described.files] + public


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
            link_files(folder, copy / place, _files_of(folder))
        except (OSError, CheckpointError):
            if place in required:
                raise
            del carried[place]
            if (copy / place).exists():
                files.remove_tree(copy / place)


def _files_of(checkpoint: Path) -> list[str]:
    """Return the files of a checkpoint: those that its manifest names, and what others may see of what was added.

    Raises:
        CheckpointError: it is not a checkpoint, or a file that its manifest names must not leave this machine.
    """
    named = manifest.read(checkpoint).files
    for name in named:
        if any(_matches(part, NEVER_PUSHED) for part in name.split("/")):
            raise CheckpointError(
                f"{checkpoint.name} holds {name}, which is never pushed, and cannot be restored without it; keep such "
                "files outside of checkpoints"
            )
    added, _ = public_files(checkpoint, checkpoint.name)
    return sorted({names.MANIFEST, *named, *added})


def discard(copy: Path) -> None:
    """Remove a copy, if it exists; after a failure the next save removes it."""
    if copy.exists():
        staging.discard(copy)
    processes.release(copy)


def _absent(source: Path, target: Path, names: Iterable[str]) -> Iterator[tuple[Path, Path]]:
    for name in names:
        place = target / name
        # Never overwritten: it may be a hard link to a checkpoint's own file.
        if not place.exists():
            files.make_folders(place.parent)
            yield place, source / name
