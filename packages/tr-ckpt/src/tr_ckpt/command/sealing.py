"""`trainer ckpt seal`: accept a checkpoint whose files somebody changed on purpose."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tr_ckpt import catalogue, files, manifest, names, plain_file, staging, strict_json, tensor_file
from tr_ckpt.command.table import say
from tr_ckpt.errors import CheckpointError
from tr_ckpt.files import FileRecord
from tr_ckpt.folder_lock import locked
from tr_ckpt.manifest import Manifest


def run(arguments: argparse.Namespace) -> int:
    """Show what was changed in a checkpoint, ask, and write its manifest again, as of its files now.

    Raises:
        CheckpointError: it is no checkpoint of ours, a file of its parts is missing or cannot be read as what it is, or
            there is nobody to ask.
        FolderInUseError: a run saves to the folder that it is in.
    """
    folder = Path(arguments.checkpoint).expanduser()
    described = manifest.read(folder)
    step = names.step_of(folder.absolute().name, arguments.prefix)
    if step is not None and step != described.step:
        raise CheckpointError(f"{folder} is a copy of step {described.step}; give it the name of that step")
    changed = catalogue.damages(folder, described, list(described.files))
    if not changed:
        say(f"{folder}: nothing was changed since it was written")
        return 0
    gone = [name for name in described.files if not os.path.lexists(folder / name)]
    owned = {name for of_part in described.parts.values() for name in of_part}
    if lost := sorted(owned.intersection(gone)):
        raise CheckpointError(f"{folder} cannot be accepted: {', '.join(lost)} is missing, and belongs to a part of it")
    now = {name: files.seal_file(_plain(folder, name)) for name in described.files if name not in gone}
    other = [name for name, record in now.items() if record != described.files[name]]
    _check_readable(folder, other)
    say(f"{folder}, step {described.step}:")
    for line in changed:
        say(f"  {line}")
    if not arguments.yes and not _confirmed():
        say("nothing was written")
        return 0
    held = {name: now[name] if name in other else described.files[name] for name in now}
    with locked(folder.absolute().parent):
        _write(folder, replace(described, files=held))
    say(f"accepted: a run resumes from it as from any other, with {', '.join([*other, *gone])} as now")
    return 0


def _plain(folder: Path, name: str) -> Path:
    if problem := plain_file.wrong_kind(folder, name):
        raise CheckpointError(f"{folder} cannot be accepted: {name} {problem}")
    return folder / name


def _check_readable(folder: Path, changed: Iterable[str]) -> None:
    """Raise where a file is no more of the form that it had: that is no change on purpose."""
    for name in changed:
        try:
            if name.endswith(".json"):
                strict_json.loads((folder / name).read_text(encoding="utf-8"))
            elif name.endswith(".safetensors"):
                tensor_file.read(folder / name)
        except (CheckpointError, ValueError) as error:
            raise CheckpointError(f"{folder} cannot be accepted: {name} cannot be read: {error}") from error


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise CheckpointError("nothing was written: there is no terminal to ask on; give --yes")
    try:
        answer = input("accept it as it is now? [y/N] ")
    except EOFError:
        say()
        return False
    return answer.strip().lower() in ("y", "yes")


def _write(folder: Path, described: Manifest) -> FileRecord:
    """Put another manifest in the place of the one that is there; a crash leaves one of the two."""
    beside = names.temporary(folder.absolute().parent, "writing", folder.absolute().name)
    files.make_folder(beside)
    try:
        record = manifest.write(beside, described)
        if os.name == "nt":  # where a rename does not replace
            files.remove_file(folder / names.MANIFEST)
        files.rename(beside / names.MANIFEST, folder / names.MANIFEST)
        files.sync_folder(folder)
    finally:
        staging.discard(beside)
        names.release(beside)
    return record
