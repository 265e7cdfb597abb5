"""List, verify, compare, export, prune, accept and import checkpoints."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from tr_ckpt.errors import CheckpointError
from tr_log.formatting import printable

ERROR = 2

# Imported on use: some take a second to load.
_MODULES = {
    "ls": "listing",
    "verify": "listing",
    "diff": "comparing",
    "export": "exporting",
    "prune": "pruning",
    "seal": "pruning",
    "import": "exporting",
}

_DIR = "a run's output folder, or one checkpoint in it"
_CHECKPOINT = "a checkpoint; of an output folder, its newest complete one"

_EXIT = {
    "ls": "Exit code: 0, 1 if a checkpoint is damaged, 2 if there is none.",
    "verify": "Exit code: 0, 1 if a checkpoint is damaged or none could be verified, 2 if there is none.",
    "diff": "Exit code: 0 if they are equal, 1 if they differ, 2 if they cannot be compared.",
    "prune": "Exit code: 0, or 1 if there is no valid checkpoint to keep or one could not be removed.",
}

_EXAMPLES = {
    "ls": ["run", "run --json"],
    "verify": ["run", "run/checkpoint-500"],
    "diff": [
        "run/checkpoint-500 run/checkpoint-1000",
        "run-a run-b --ignore '*_runtime' --ignore '*_per_second'",
    ],
    "export": ["run/checkpoint-500 my-model", "run my-model --dtype bf16 --max-shard-size 5GB"],
    "prune": ["run --keep 3 --keep-best --dry-run", "run --keep 2 --keep-every 1000 --yes"],
    "seal": ["run/checkpoint-500", "run/checkpoint-500 --yes"],
    "import": ["old-run/checkpoint-500 run"],
}

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit code: 0 on success; 1 if a checkpoint is damaged, or two differ; 2 if the request
        cannot be carried out; 130 after Ctrl-C.

    Raises:
        SystemExit: help was requested (0) or the arguments are wrong (2).
    """
    arguments = build_parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without "…" must not make the command fail
    try:
        module = import_module(f"tr_ckpt.command.{_MODULES[arguments.action]}")
        run: Callable[..., int] = getattr(module, f"run_{arguments.action}")
        code = run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (CheckpointError, OSError, RecursionError) as error:
        print(f"trainer ckpt {arguments.action}: {printable(_text(error), lines=True)}", file=sys.stderr)
        return ERROR


def _text(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; its result has `action` and that action's arguments."""
    parser = argparse.ArgumentParser(prog="trainer ckpt", description="Manage checkpoints.", allow_abbrev=False)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_reading(actions)
    _add_diff(actions)
    _add_export(actions)
    _add_prune(actions)
    seal = _action(
        actions, "seal", "accept a checkpoint as it is now, after a change on purpose; shows the change first"
    )
    seal.add_argument("checkpoint", metavar="CKPT", help="a checkpoint")
    _add_prefix(seal)
    seal.add_argument("--yes", action="store_true", help="do not ask")
    of_import = _action(actions, "import", "turn a checkpoint of transformers' Trainer into one of ours")
    of_import.add_argument("source", metavar="SOURCE", help="a checkpoint that transformers' Trainer wrote")
    of_import.add_argument("target", metavar="TARGET", help="the run's output folder, which gets a checkpoint-<step>")
    _add_prefix(of_import)
    return parser


def _add_reading(actions: Any) -> None:
    for name, text in (
        ("ls", "list checkpoints; a file that is missing or has another size shows"),
        ("verify", "read every byte and compare it with what was written"),
    ):
        action = _action(actions, name, text)
        action.add_argument("directory", metavar="DIR", help=_DIR)
        _add_prefix(action)
        action.add_argument("--json", action="store_true", help="print one JSON object for other programs")


def _add_diff(actions: Any) -> None:
    diff = _action(actions, "diff", "say how much differs between two checkpoints, and what first")
    diff.add_argument("first", metavar="A", help=_CHECKPOINT)
    diff.add_argument("second", metavar="B", help="the same for the other checkpoint")
    _add_prefix(diff)
    diff.add_argument("--all", action="store_true", help="show every difference, not only the first of each part")
    diff.add_argument("--part", action="append", metavar="NAME", help="compare this part only; may be repeated")
    diff.add_argument(
        "--ignore",
        action="append",
        metavar="PATTERN",
        default=[],
        help="leave out values and tensors whose place matches, such as '*_runtime'; may be repeated",
    )
    diff.add_argument("--manifest", action="store_true", help="compare times of saving and versions too")


def _add_export(actions: Any) -> None:
    export = _action(actions, "export", "write a model folder that from_pretrained loads")
    export.add_argument("checkpoint", metavar="CKPT", help=_CHECKPOINT)
    export.add_argument("target", metavar="TARGET", help="the folder to make")
    _add_prefix(export)
    export.add_argument(
        "--dtype", choices=["fp32", "fp16", "bf16"], help="turn floating-point weights into this; default: as they are"
    )
    export.add_argument(
        "--max-shard-size",
        type=_size_bytes,
        metavar="SIZE",
        help="split the weights into files of at most this, such as 5GB; default: one file",
    )
    export.add_argument("--part", default="model", metavar="NAME", help="the part that holds the weights (%(default)s)")
    export.add_argument("--overwrite", action="store_true", help="replace a model folder that is there already")


def _add_prune(actions: Any) -> None:
    prune = _action(actions, "prune", "remove old checkpoints; never the newest valid one, which is verified first")
    prune.add_argument("directory", metavar="DIR", help="a run's output folder")
    _add_prefix(prune)
    prune.add_argument("--keep", type=_count, required=True, metavar="N", help="how many complete ones stay")
    prune.add_argument(
        "--keep-every", type=_count, metavar="M", help="and those whose step is a multiple of M, which do not count"
    )
    prune.add_argument("--keep-best", action="store_true", help="and the best, as the newest one knows it")
    prune.add_argument("--dry-run", action="store_true", help="only show what would be removed")
    prune.add_argument("--yes", action="store_true", help="do not ask")


def _action(actions: Any, name: str, text: str) -> argparse.ArgumentParser:
    examples = "\n".join(f"  trainer ckpt {name} {words}" for words in _EXAMPLES[name])
    return actions.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog="\n".join([*([_EXIT[name], ""] if name in _EXIT else []), "examples:", examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _add_prefix(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--prefix", default="checkpoint", metavar="TEXT", help="what the names of checkpoints begin with (%(default)s)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; give 1 or more")
    return int(text)


def _size_bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    size = int(float(match[1]) * _UNITS[match[2].upper()]) if match and match[2].upper() in _UNITS else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; give one such as 500MB or 5GB")
    return size
