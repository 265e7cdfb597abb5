"""Find out before training whether checkpoints can be written where they are to be, and keep other runs from there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


def check_that_it_can_be_written_to(trainer: Trainer) -> None:
    """Refuse an `output_dir` that the first save would fail at, on all ranks; a checkpointer of one's own knows its.

    Raises:
        ValueError: a file is in the way, or this user may not write there.
    """
    args, strategy = trainer.args, trainer.strategy
    if args.save_strategy == "no" or trainer.has_own_checkpointer:
        return
    writes = strategy.rank == 0 or (args.save_on_each_node and strategy.local_rank == 0)
    own = obstacle(Path(args.output_dir).absolute()) if writes else ""
    if found := next(filter(None, strategy.gather_objects(own)), ""):
        raise ValueError(f"{found}; save_strategy='no' trains without checkpoints")


def claim(trainer: Trainer) -> None:
    """Keep other runs from saving where this one will, if its checkpointer knows how, until `releasing` ends.

    Raises:
        OSError: another run does, or that cannot be found out.
    """
    if trainer.args.save_strategy != "no":
        checkpointer: Any = trainer.checkpointer()
        if (take := getattr(checkpointer, "claim", None)) is not None:
            take()


@contextmanager
def releasing(trainer: Trainer) -> Iterator[None]:
    """Let other runs save to the folder of this one when the block ends, whichever way."""
    try:
        yield
    finally:
        # Whatever asked for it: a callback may save in a run that was not to.
        release = getattr(trainer._checkpointer, "release", None)
        if release is not None:
            release()


def obstacle(folder: Path) -> str:
    """Say what keeps a folder from being made or written to, and what to change; empty if nothing does.

    Args:
        folder: its absolute path.
    """
    existing = nearest_existing(folder)
    if not existing.is_dir():
        return f"output_dir={str(folder)!r} cannot be made: {existing} is a file; give another folder, or move the file"
    if not os.access(existing, os.W_OK | os.X_OK):
        return (
            f"output_dir={str(folder)!r} cannot be written to: this user may not write to {existing}; give another "
            "folder, or the right to write there"
        )
    return ""


def nearest_existing(folder: Path) -> Path:
    """Return the path itself, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))
