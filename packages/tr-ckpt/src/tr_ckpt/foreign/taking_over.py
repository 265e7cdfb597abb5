"""Read from another program's checkpoint what a run is to go on from."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tr_ckpt import parts
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.foreign.fitting import fit
from tr_ckpt.foreign.reading import read

logger = logging.getLogger(__name__)

# A file that says of a checkpoint of ours which program's it was.
NOTE = "foreign.json"


def read_into(
    states: dict[str, Any],
    path: Path,
    step: int | None,
    targets: Mapping[str, Any],
    rank: int,
    optional: Collection[str] = (),
) -> int:
    """Put the states that `targets` take, and that fit them, into `states`, by name; no target is changed.

    Args:
        states: what is read.
        path: the checkpoint.
        step: the one in its name; None if it was named outright.
        targets: parts to be loaded, by name.
        rank: number of this process.
        optional: those of `targets` that stay as they are where it does not hold them.

    Returns:
        The checkpoint's step.

    Raises:
        CheckpointError: it lacks a part, or holds one that fits another model or anything but plain state.
        DamagedCheckpointError: it is damaged.
    """
    checkpoint = read(path)
    if step not in (None, checkpoint.step):
        raise DamagedCheckpointError(f"it is of step {checkpoint.step}")
    for part, target in targets.items():
        if part in optional and part not in checkpoint.parts:
            continue
        if checkpoint.has(part, rank):
            states[part] = fit(part, checkpoint.state(part, rank), target)
        elif part in parts.PER_RANK:
            logger.warning("%s of rank %d is not in %s; it stays as it is", part, rank, path.name)
        else:
            raise CheckpointError(
                f"there is no {part!r} in it, as {checkpoint.program} saves nothing of the kind: go on without what "
                "needs it"
            )
    if rank == 0:
        _tell(checkpoint.program, path.name, sorted(states), checkpoint.notes)
    return checkpoint.step


def _tell(program: str, name: str, taken: list[str], notes: tuple[str, ...]) -> None:
    if "optimizer" not in taken:  # one part of it, not a run that goes on
        return
    logger.info("%s is a checkpoint of %s: %s are taken over", name, program, ", ".join(taken))
    for note in notes:
        logger.info("%s: %s", name, note)
