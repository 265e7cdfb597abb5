"""`trainer ckpt prune`: remove old checkpoints."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tr_ckpt import names, retention, staging
from tr_ckpt.catalogue import Found
from tr_ckpt.command import selection, trainer_state
from tr_ckpt.command.selection import COMPLETE, Entry, bytes_below
from tr_ckpt.command.table import Column, render, say, say_lines, size_text, terminal_width
from tr_ckpt.command.verifying import verify
from tr_ckpt.errors import CheckpointError
from tr_ckpt.folder_lock import locked


def run(arguments: argparse.Namespace) -> int:
    """Show which checkpoints are too many and remove them; returns 1 if that cannot be done for all.

    Raises:
        CheckpointError: there is no folder of checkpoints, or nobody to ask.
        FolderInUseError: a run saves to it, which removes old ones itself.
    """
    directory = Path(arguments.directory).expanduser()
    entries = selection.select(directory, arguments.prefix)
    if (directory / names.MANIFEST).exists() or entries[0].found.path == directory:
        raise CheckpointError(f"{directory} is one checkpoint; give the folder that it is in")
    newest, passed_over = _newest_valid(entries)
    for entry in passed_over:
        say(f"{entry.found.name} is damaged and stays: {entry.problem}", file=sys.stderr)
    if newest is None or newest.step is None:
        say("nothing is removed: there is no valid checkpoint to keep", file=sys.stderr)
        return 1
    best = _best(newest) if arguments.keep_best else None
    damaged = [entry.step for entry in passed_over if entry.step is not None]
    every = arguments.keep_every
    keep = arguments.keep + sum(
        every is None or step % every != 0 for step in damaged
    )  # they are none of those asked for
    protected = [*damaged, *([] if best is None else [best])]
    complete = [found for _, found in retention.complete(directory, arguments.prefix)]
    going = retention.superfluous(complete, keep, newest.step, protected, every)
    known = {entry.found: entry for entry in (*entries, *passed_over)}  # what verifying found replaces what ls shows
    _show(list(known.values()), going, newest, best)
    left = staging.cut_short(directory, "removed")  # as a prune leaves that is killed; perhaps no save ever comes
    if left:
        size = sum(bytes_below(path, alone=True) for path in left)
        say(f"{len(left)} that an earlier removal left half done, {size_text(size)} to free")
    if not (going or left) or arguments.dry_run:
        return 0
    if not arguments.yes and not _confirmed(len(going) + len(left)):
        say("nothing was removed")
        return 0
    with locked(directory.absolute()):
        for path in (*left, *staging.cut_short(directory, "lock")):
            staging.discard(path)
        return _remove(going)


def _best(newest: Entry) -> int:
    best = trainer_state.best_step(trainer_state.read_state(newest.found.path))
    if best is None:
        raise CheckpointError(
            f"nothing was removed: {newest.found.name} knows of no best step, so --keep-best cannot keep it; "
            "leave that out, or raise --keep"
        )
    return best


def _newest_valid(entries: list[Entry]) -> tuple[Entry | None, list[Entry]]:
    """Return the newest that reads back as it was written, and those after it that do not."""
    passed_over = []
    for entry in reversed(entries):
        if entry.condition != COMPLETE:
            continue
        [checked] = verify([entry])
        if checked.condition == COMPLETE:
            return checked, passed_over
        passed_over.append(checked)
    return None, passed_over


def _show(entries: list[Entry], going: list[Found], newest: Entry, best: int | None) -> None:
    leaving = {found.name for found in going}
    shown = sorted(entries, key=lambda entry: -1 if entry.step is None else entry.step)
    kept = {entry.found.name: "stays, best" for entry in entries if best is not None and entry.step == best}
    kept[newest.found.name] = "stays, newest, verified"
    columns = [
        Column("checkpoint", [entry.found.name for entry in shown]),
        Column("size", [size_text(bytes_below(entry.found.path)) for entry in shown], right=True),
        Column("", [_fate(entry, leaving, kept) for entry in shown]),
    ]
    say_lines(render(columns, terminal_width()))
    freed = sum(bytes_below(found.path, alone=True) for found in going)
    what = f"{len(going)} checkpoint{'s' * (len(going) != 1)}"
    say()
    say(f"{what} to remove, {size_text(freed)} to free" if going else "nothing to remove")


def _fate(entry: Entry, leaving: set[str], kept: dict[str, str]) -> str:
    if entry.found.name in leaving:
        return "goes"
    if entry.condition != COMPLETE:
        return f"stays, {entry.condition}"
    return kept.get(entry.found.name, "stays")


def _confirmed(number: int) -> bool:
    if not sys.stdin.isatty():
        raise CheckpointError("nothing was removed: there is no terminal to ask on; give --yes")
    try:
        answer = input(f"remove {number}? [y/N] ")
    except EOFError:
        say()
        return False
    return answer.strip().lower() in ("y", "yes")


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
