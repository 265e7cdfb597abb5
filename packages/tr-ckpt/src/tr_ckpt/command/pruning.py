"""`trainer ckpt prune` and `seal`: remove old checkpoints, and accept one whose files were changed on purpose."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tr_ckpt import discovery, files, manifest, names, processes, retention, staging, tensor_file, untrusted
from tr_ckpt.command import selection
from tr_ckpt.command.listing import verify
from tr_ckpt.command.selection import COMPLETE, Entry, bytes_below
from tr_ckpt.command.terminal import Column, render, say, say_lines, terminal_width
from tr_ckpt.discovery import Found
from tr_ckpt.errors import CheckpointError
from tr_ckpt.files import FileRecord
from tr_ckpt.folder_lock import locked
from tr_ckpt.manifest import Manifest
from tr_log.formatting import size


def run_prune(arguments: argparse.Namespace) -> int:
    """Show which checkpoints are beyond the limit and remove them; return 1 if that fails for one.

    Raises:
        CheckpointError: there is no folder of checkpoints, or no terminal to confirm on.
        FolderInUseError: a run saves to it, which removes old ones itself.
    """
    directory = Path(arguments.directory).expanduser()
    entries = selection.select(directory, arguments.prefix)
    if (directory / names.MANIFEST).exists() or entries[0].found.path == directory:
        raise CheckpointError(f"{directory} is one checkpoint; give the folder that it is in")
    newest, damaged_entries = _newest_valid(entries)
    for entry in damaged_entries:
        say(f"{entry.found.name} is damaged and stays: {entry.problem}", file=sys.stderr)
    if newest is None or newest.step is None:
        say("nothing is removed: there is no valid checkpoint to keep", file=sys.stderr)
        return 1
    best = _best(newest) if arguments.keep_best else None
    damaged = [entry.step for entry in damaged_entries if entry.step is not None]
    every = arguments.keep_every
    keep = arguments.keep + sum(
        every is None or step % every != 0 for step in damaged
    )  # they are none of those asked for
    protected = [*damaged, *([] if best is None else [best])]
    complete = [found for _, found in retention.complete(directory, arguments.prefix)]
    going = retention.superfluous(complete, keep, newest.step, protected, every)
    known = {entry.found: entry for entry in (*entries, *damaged_entries)}  # results of verifying replace those of `ls`
    _show(list(known.values()), going, newest, best)
    left = staging.cut_short(directory, "removed")  # leftovers of a killed prune, which no save may ever clear away
    if left:
        half_done = size(sum(bytes_below(path, alone=True) for path in left))
        say(f"{len(left)} that an earlier removal left half done, {half_done} to free")
    if not (going or left) or arguments.dry_run:
        return 0
    if not arguments.yes and not _confirmed(f"remove {len(going) + len(left)}?", "nothing was removed"):
        return 0
    with locked(directory.absolute()):
        for path in (*left, *staging.cut_short(directory, "lock")):
            staging.discard(path)
        return _remove(going)


def _best(newest: Entry) -> int:
    best = selection.best_step(selection.read_state(newest.found.path))
    if best is None:
        raise CheckpointError(
            f"nothing was removed: {newest.found.name} knows of no best step, so --keep-best cannot keep it; "
            "leave that out, or raise --keep"
        )
    return best


def _newest_valid(entries: list[Entry]) -> tuple[Entry | None, list[Entry]]:
    """Return the newest checkpoint that is intact, and the damaged ones after it."""
    damaged_entries = []
    for entry in reversed(entries):
        if entry.condition != COMPLETE:
            continue
        [checked] = verify([entry])
        if checked.condition == COMPLETE:
            return checked, damaged_entries
        damaged_entries.append(checked)
    return None, damaged_entries


def _show(entries: list[Entry], going: list[Found], newest: Entry, best: int | None) -> None:
    leaving = {found.name for found in going}
    shown = sorted(entries, key=lambda entry: -1 if entry.step is None else entry.step)
    kept = {entry.found.name: "stays, best" for entry in entries if best is not None and entry.step == best}
    kept[newest.found.name] = "stays, newest, verified"
    columns = [
        Column("checkpoint", [entry.found.name for entry in shown]),
        Column("size", [size(bytes_below(entry.found.path)) for entry in shown], right=True),
        Column("", [_fate(entry, leaving, kept) for entry in shown]),
    ]
    say_lines(render(columns, terminal_width()))
    freed = sum(bytes_below(found.path, alone=True) for found in going)
    what = f"{len(going)} checkpoint{'s' * (len(going) != 1)}"
    say()
    say(f"{what} to remove, {size(freed)} to free" if going else "nothing to remove")


def _fate(entry: Entry, leaving: set[str], kept: dict[str, str]) -> str:
    if entry.found.name in leaving:
        return "goes"
    if entry.condition != COMPLETE:
        return f"stays, {entry.condition}"
    return kept.get(entry.found.name, "stays")


def _confirmed(question: str, refusal: str) -> bool:
    """Ask on the terminal; say `refusal` if the answer is not yes."""
    if not sys.stdin.isatty():
        raise CheckpointError(f"{refusal}: there is no terminal to ask on; give --yes")
    try:
        if input(f"{question} [y/N] ").strip().lower() in ("y", "yes"):
            return True
    except EOFError:
        say()
    say(refusal)
    return False


def _remove(going: list[Found]) -> int:
    failed = 0
    for found in going:
        try:
            retention.remove(found)
        except OSError as error:
            failed += 1
            say(f"{found.name} could not be removed: {error.strerror or error}", file=sys.stderr)
        else:
            say(f"removed {found.name}")
    return int(bool(failed))


def run_seal(arguments: argparse.Namespace) -> int:
    """Show what was changed in a checkpoint, ask, and rewrite its manifest for its present files.

    Raises:
        CheckpointError: it is not in this format, a file of its parts does not exist or has lost its format, or
            there is no terminal to confirm on.
        FolderInUseError: a run saves to the folder that it is in.
    """
    folder = Path(arguments.checkpoint).expanduser()
    described = manifest.read(folder)
    step = names.step_of(folder.absolute().name, arguments.prefix)
    if step is not None and step != described.step:
        raise CheckpointError(f"{folder} is a copy of step {described.step}; give it the name of that step")
    changed = discovery.damages(folder, described, list(described.files))
    if not changed:
        say(f"{folder}: nothing was changed since it was written")
        return 0
    gone = [name for name in described.files if not os.path.lexists(folder / name)]
    owned = {name for of_part in described.parts.values() for name in of_part}
    if lost := sorted(owned.intersection(gone)):
        raise CheckpointError(f"{folder} cannot be accepted: {', '.join(lost)} is missing, and belongs to a part of it")
    now = {name: files.seal_file(_regular_file(folder, name)) for name in described.files if name not in gone}
    other = [name for name, record in now.items() if record != described.files[name]]
    _check_readable(folder, other)
    say(f"{folder}, step {described.step}:")
    for damage in changed:
        say(f"  {damage.text}")
    if not arguments.yes and not _confirmed("accept it as it is now?", "nothing was written"):
        return 0
    held = {name: now[name] if name in other else described.files[name] for name in now}
    with locked(folder.absolute().parent):
        _write_manifest(folder, replace(described, files=held))
    say(f"accepted: a run resumes from it as from any other, with {', '.join([*other, *gone])} as now")
    return 0


def _regular_file(folder: Path, name: str) -> Path:
    if problem := untrusted.file_kind_problem(folder, name):
        raise CheckpointError(f"{folder} cannot be accepted: {name} {problem}")
    return folder / name


def _check_readable(folder: Path, changed: Iterable[str]) -> None:
    """Raise if a file has lost its format: then it was not changed on purpose."""
    for name in changed:
        try:
            if name.endswith(".json"):
                untrusted.parse_json((folder / name).read_text(encoding="utf-8"))
            elif name.endswith(".safetensors"):
                tensor_file.read(folder / name)
        except (CheckpointError, ValueError) as error:
            raise CheckpointError(f"{folder} cannot be accepted: {name} cannot be read: {error}") from error


def _write_manifest(folder: Path, described: Manifest) -> FileRecord:
    """Replace the manifest; a crash leaves either the old or the new one."""
    beside = processes.temporary(folder.absolute().parent, "writing", folder.absolute().name)
    files.make_folder(beside)
    try:
        record = manifest.write(beside, described)
        if os.name == "nt":  # a rename does not replace files there
            files.remove_file(folder / names.MANIFEST)
        files.rename(beside / names.MANIFEST, folder / names.MANIFEST)
        files.sync_folder(folder)
    finally:
        staging.discard(beside)
        processes.release(beside)
    return record
