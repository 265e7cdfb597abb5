"""`trainer ckpt verify`: read every byte of checkpoints, and open each file as a load would."""

from __future__ import annotations

import argparse
import hashlib
from dataclasses import replace
from pathlib import Path

from tr_ckpt import catalogue, reading_back, reads
from tr_ckpt.command import listing, selection
from tr_ckpt.command.progress import Progress
from tr_ckpt.command.selection import COMPLETE, DAMAGED, UNREADABLE, Entry
from tr_ckpt.errors import UnreadableError
from tr_ckpt.files import BLOCK_BYTES
from tr_ckpt.manifest import Manifest


def run(arguments: argparse.Namespace) -> int:
    """Verify the checkpoints and print what is wrong with each; returns 1 if one is damaged or none was verified."""
    directory = Path(arguments.directory).expanduser()
    entries = verify(selection.select(directory, arguments.prefix))
    listing.show(directory, entries, as_json=arguments.json, good="verified")
    conditions = {entry.condition for entry in entries}
    return int(DAMAGED in conditions or UNREADABLE in conditions or COMPLETE not in conditions)


def verify(entries: list[Entry]) -> list[Entry]:
    """Return the entries, with the condition of each that reads back otherwise than it was written changed."""
    total = sum(entry.described.total_bytes for entry in entries if entry.described and entry.condition == COMPLETE)
    progress = Progress(total)
    try:
        return [_verify_if_readable(entry, progress) for entry in entries]
    finally:
        progress.end()


def _verify_if_readable(entry: Entry, progress: Progress) -> Entry:
    try:
        return _verify(entry, progress)
    except UnreadableError as error:
        return replace(entry, condition=UNREADABLE, problem=str(error))


def _verify(entry: Entry, progress: Progress) -> Entry:
    described = entry.described
    if entry.condition == COMPLETE and described is not None:
        damages = []
        for name in described.files:
            progress.begin(f"{entry.found.name}/{name}")
            damages += _damage(entry.found.path, described, name, progress)
        if damages:
            return replace(entry, condition=DAMAGED, problem="; ".join(damages))
        if problems := reading_back.problems(entry.found.path, described):
            return replace(entry, condition=UNREADABLE, problem="; ".join(problems))
    elif entry.condition == DAMAGED and described is not None:  # sizes were wrong: there may be more
        damages = catalogue.damages(entry.found.path, described, list(described.files))
        return replace(entry, problem="; ".join(damages) or entry.problem)
    return entry


def _damage(folder: Path, described: Manifest, name: str, progress: Progress) -> list[str]:
    digest = hashlib.sha256()
    try:
        for block in reads.blocks(folder / name, BLOCK_BYTES):
            digest.update(block)
            progress.advance(len(block))
    except OSError:
        pass  # put into words below
    if digest.hexdigest() == described.files[name].sha256:
        return []
    return catalogue.damages(folder, described, [name])  # once more, to say where
