"""Decide what becomes of an earlier run's checkpoints, and say how a run is continued."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from input_error import InputError

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
# What the command that continues says itself, and what a launcher added.
_REPLACED = ("resume_from_checkpoint", "overwrite_output_dir", "num_train_epochs", "max_steps", "local_rank")


def checkpoints(output_dir: str | Path) -> list[Path]:
    """Return the checkpoints' folders in `output_dir`, ascending by step."""
    folder = Path(output_dir).expanduser()
    found = [(int(match[1]), path) for path in folder.glob("checkpoint-*") if (match := _matches(path))]
    return [path for _, path in sorted(found)]


def begin_in(args: Any) -> None:
    """Make sure that what a run will find in `output_dir` is what was asked for; call it before anything is loaded.

    With `overwrite_output_dir` the checkpoints of an earlier run are removed, or a later resume would take them for
    this run's.

    Raises:
        InputError: there are checkpoints and nobody said what to do with them, or there is none to resume from, or
            both resuming and overwriting were asked for.
    """
    found = checkpoints(args.output_dir)
    resume = args.resume_from_checkpoint
    wants_resume = resume not in (None, False, "auto")
    if wants_resume and args.overwrite_output_dir:
        raise InputError(
            f"--resume_from_checkpoint {resume} continues a run and --overwrite_output_dir throws it away; keep one"
        )
    if resume is True and not found:
        raise InputError(
            f"--resume_from_checkpoint True: there is no checkpoint in {args.output_dir}; leave it out to begin a run"
        )
    if found and resume in (None, False) and not args.overwrite_output_dir:
        raise InputError(
            f"{args.output_dir} holds {len(found)} checkpoint(s) of an earlier run, the last one {found[-1].name}; add "
            "--resume_from_checkpoint True to continue that run, or --overwrite_output_dir to throw it away and begin "
            "anew, or give another --output_dir"
        )
    if args.overwrite_output_dir:
        with args.main_process_first(desc="removing the earlier run's checkpoints"):
            for path in checkpoints(args.output_dir) if args.should_save else ():
                shutil.rmtree(path)


def continuing_command(argv: Sequence[str], script: str | Path, args: Any, state: Any) -> str:
    """Return the command that continues a run: to its end if it was stopped before, else for as long again.

    Args:
        argv: the words that the run was started with, without the script's name.
        script: the script.
        args: the run's training arguments.
        state: the run's trainer state.
    """
    words = [*_launcher(args), _shortest(Path(script)), *_without(argv, _REPLACED)]
    again = 1 if state.global_step < state.max_steps else 2
    if args.max_steps > 0:
        words += ["--max_steps", str(again * args.max_steps)]
    else:
        words += ["--num_train_epochs", f"{again * args.num_train_epochs:g}"]
    words += ["--resume_from_checkpoint", "True"]
    if args.overwrite_output_dir and "overwrite_output_dir" not in map(
        _flag, argv
    ):  # it stands in a configuration file
        words += ["--overwrite_output_dir", "False"]
    return shlex.join(words)


def _matches(path: Path) -> re.Match[str] | None:
    return _CHECKPOINT.fullmatch(path.name) if path.is_dir() else None


def _launcher(args: Any) -> list[str]:
    python = _shortest(Path(sys.executable))
    if args.world_size == 1:
        return [python]
    if os.environ.get("LOCAL_WORLD_SIZE") != str(args.world_size):
        return []  # several machines: how they were started is not known here
    return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.world_size)]


def _shortest(path: Path) -> str:
    # Not resolved: the interpreter of a virtual environment is a link, and what it links to is another environment.
    absolute = path.absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else str(absolute)


def _flag(word: str) -> str | None:
    """Return the argument that a word names; None for a word that is a value."""
    if not word.startswith("--"):
        return None
    return word.removeprefix("--").partition("=")[0].replace("-", "_").removeprefix("no_")


def _without(argv: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    """Yield the words without the flags called `names` and without their values."""
    skipping = False
    for word in argv:
        if (flag := _flag(word)) is not None:
            skipping = flag in names
        if not skipping:
            yield word
