"""List and verify the checkpoints of a folder."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tr_ckpt import catalogue, manifest, names
from tr_ckpt.catalogue import Found
from tr_ckpt.errors import CheckpointError
from tr_ckpt.manifest import Manifest

_COLUMNS = ("checkpoint", "size", "ranks", "saved at (UTC)", "parts", "condition")


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns 0, or 1 if a checkpoint is damaged or there is none.

    Raises:
        SystemExit: help was asked for (0) or the arguments are wrong (2).
    """
    arguments = _parser().parse_args(argv)
    directory = Path(arguments.directory).expanduser()
    found = _checkpoints(directory, arguments.prefix)
    if not found:
        wanted = f"neither a {names.MANIFEST} nor a folder {arguments.prefix}-<step>"
        print(f"no checkpoint in {directory}: it holds {wanted}", file=sys.stderr)
        return 1
    rows = [_examine(each, thorough=arguments.action == "verify") for each in found]
    print(_table([_COLUMNS, *rows]))
    return int(any(row[-1] not in _GOOD for row in rows))


_GOOD = ("complete", "verified")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer ckpt", description="Look after checkpoints.", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, text in (
        ("ls", "list the checkpoints; a file that is missing or has another size shows"),
        ("verify", "read every byte and compare it with what was written"),
    ):
        of_action = actions.add_parser(
            action, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        of_action.add_argument("directory", metavar="DIR", help="a folder of checkpoints, or one checkpoint")
        of_action.add_argument("--prefix", default="checkpoint", help="what their names begin with (%(default)s)")
    return parser


def _checkpoints(directory: Path, prefix: str) -> list[Found]:
    if not (directory / names.MANIFEST).exists():
        return catalogue.find(directory, prefix)
    name = directory.absolute().name
    return [Found(names.step_of(name, prefix), name, directory)]


def _examine(found: Found, *, thorough: bool) -> tuple[str, ...]:
    described, condition = None, _GOOD[thorough]
    try:
        described = manifest.read(found.path)
        catalogue.check_quickly(found)
        if thorough:
            catalogue.verify(found.path, described)
    except CheckpointError as damage:
        condition = str(damage)
    return (found.name, *_facts(described), condition)


def _facts(described: Manifest | None) -> tuple[str, ...]:
    if described is None:
        return ("", "", "", "")
    saved_at = described.saved_at.removesuffix("+00:00").replace("T", " ")
    return (
        _size(described.total_bytes),
        str(described.world_size),
        saved_at,
        " ".join(sorted(described.parts)),
    )


def _size(size_bytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.0f} {unit}" if size_bytes >= 100 else f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} TB"


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(padded)
