"""Resume from a checkpoint of another program, or convert it to one of ours.

`read` finds out which program wrote it. A further format is one more module with `PROGRAM`, `recognises(path)` and
`read(path)`, named in `READERS`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tr_ckpt import discovery, manifest, names, parts, reads
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.files import FileRecord
from tr_ckpt.folder_lock import locked
from tr_ckpt.hf_import import trainer_files
from tr_ckpt.hf_import.fitting import fit
from tr_ckpt.hf_import.trainer_files import ForeignCheckpoint
from tr_ckpt.staging import Staging

READERS = (trainer_files,)


def read(path: str | Path) -> ForeignCheckpoint:
    """Return what the checkpoint of another program says, in the shape of the parts of ours; executes nothing of it.

    Raises:
        CheckpointError: it is of no program that is known here, or is not read in this form.
        DamagedCheckpointError: it is damaged.
    """
    path = Path(path).expanduser().absolute()
    for reader in READERS:
        if reader.recognises(path):
            return reader.read(path)
    known = ", ".join(reader.PROGRAM for reader in READERS)
    raise CheckpointError(f"{path} is no checkpoint of a program that is read here ({known})")


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
        _log_restored(checkpoint.program, path.name, sorted(states), checkpoint.notes)
    return checkpoint.step


def _log_restored(program: str, name: str, taken: list[str], notes: tuple[str, ...]) -> None:
    if "optimizer" not in taken:  # one part of it, not a run that goes on
        return
    logger.info("%s is a checkpoint of %s: %s are taken over", name, program, ", ".join(taken))
    for note in notes:
        logger.info("%s: %s", name, note)


# What stands for the model: all of it, or its adapter.
_MODEL_PARTS = ("model", "adapter_model")

# Without these a checkpoint is one of the model alone.
_RESUME_PARTS = ("optimizer", "scheduler", "rng")


def convert(source: str | Path, target: str | Path, *, prefix: str = "checkpoint") -> Path:
    """Write the checkpoint of another program as `checkpoint-<step>` into the folder `target`; `source` stays.

    It appears whole or not at all. It can be listed, verified, compared and resumed like any other; a model that is
    resumed from it gets its tied weights as it would from `source`. Plain files, as `config.json`, are taken along.

    Args:
        source: the other program's checkpoint.
        target: the folder that ours are in; made if it is missing.
        prefix: what the names of checkpoints begin with.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: `source` lacks something, is damaged, or holds anything but plain state; or `target` has a
            checkpoint of this step.
        OSError: it could not be written, or (`FolderInUseError`) a run saves to `target`.
    """
    _refuse_own_checkpoints(Path(source).expanduser().absolute(), prefix)
    checkpoint = read(source)
    directory = Path(target).expanduser().absolute()
    name = names.checkpoint_name(prefix, checkpoint.step)
    if reads.is_there(directory / name, follow=False):
        raise CheckpointError(f"{directory / name} exists; give another folder, for nothing is written over")
    held = _parts_to_write(checkpoint)
    with locked(directory):
        folder = _write(checkpoint, directory, prefix, held)
    for note in checkpoint.notes:
        logger.info("%s: %s", checkpoint.path.name, note)
    return folder


def _write(checkpoint: ForeignCheckpoint, directory: Path, prefix: str, held: tuple[str, ...]) -> Path:
    staging = Staging(directory, names.checkpoint_name(prefix, checkpoint.step))
    try:
        added = staging.begin(lambda folder: _copy_plain_files(checkpoint, folder))
        parts.check_free(added, held)
        written: list[dict[str, dict[str, FileRecord]]] = [{"": staging.seal(added)}]
        for part in held:
            written += _write_part(checkpoint, part, staging.folder)
        sequence = discovery.next_sequence(directory, prefix)
        described = manifest.describe(checkpoint.step, checkpoint.world_size, written, sequence=sequence)
        manifest.write(staging.folder, described)
        return staging.commit()
    except BaseException:
        staging.discard()
        raise


def _refuse_own_checkpoints(source: Path, prefix: str) -> None:
    if reads.is_there(source / names.MANIFEST):
        raise CheckpointError(f"{source} is one of ours already: there is nothing to convert")
    if inside := [found for found in discovery.find(source, prefix) if discovery.is_foreign(found.path)]:
        raise CheckpointError(f"{source} holds checkpoints; give one of them, such as {inside[-1].path}")


def _parts_to_write(checkpoint: ForeignCheckpoint) -> tuple[str, ...]:
    model = [part for part in checkpoint.parts if part in _MODEL_PARTS] or _MODEL_PARTS[:1]
    if not set(_RESUME_PARTS) & set(checkpoint.parts):
        logger.info("%s holds the model only, which no run can go on from", checkpoint.path.name)
        return *model, "trainer_state"
    # Those that are missing are an error, which names their file.
    return tuple(dict.fromkeys((*model, *_RESUME_PARTS, *checkpoint.parts)))


def _write_part(checkpoint: ForeignCheckpoint, part: str, folder: Path) -> list[dict[str, dict[str, FileRecord]]]:
    written = []
    for rank in checkpoint.random_states if part in parts.PER_RANK else (0,):
        captured = parts.capture(part, rank, checkpoint.state(part, rank))
        if captured is not None:
            written.append({part: captured.write(folder)})
    return written


def _copy_plain_files(checkpoint: ForeignCheckpoint, folder: Path) -> None:
    for name in checkpoint.plain_files:
        shutil.copyfile(checkpoint.path / name, folder / name)
    about = {"program": checkpoint.program, "name": checkpoint.path.name, "notes": list(checkpoint.notes)}
    (folder / NOTE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
