"""Resume from a checkpoint of another program, or convert it to this package's format.

`read` determines which program wrote it. To add a format, write a module with `PROGRAM`, `recognises(path)` and
`read(path)`, and list it in `READERS`.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tr_ckpt import codec, discovery, manifest, names, reads
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.files import FileRecord
from tr_ckpt.folder_lock import locked
from tr_ckpt.hf_import import trainer_files
from tr_ckpt.hf_import.fitting import fit
from tr_ckpt.hf_import.trainer_files import ForeignCheckpoint
from tr_ckpt.plan import Held, whole
from tr_ckpt.staging import Staging

READERS = (trainer_files,)


def read(path: str | Path) -> ForeignCheckpoint:
    """Read the checkpoint of another program in the structure of our parts, without executing its code.

    Raises:
        CheckpointError: no reader knows its program, or this form of it.
        DamagedCheckpointError: it is damaged.
    """
    path = Path(path).expanduser().absolute()
    for reader in READERS:
        if reader.recognises(path):
            return reader.read(path)
    known = ", ".join(reader.PROGRAM for reader in READERS)
    raise CheckpointError(f"{path} is not a checkpoint of a program whose checkpoints can be read ({known})")


logger = logging.getLogger(__name__)

# A file in our checkpoint that names the program that wrote the original.
NOTE = "foreign.json"


def read_into(
    states: dict[str, Any],
    path: Path,
    step: int | None,
    targets: Mapping[str, Any],
    rank: int,
    optional: Collection[str] = (),
) -> int:
    """Read the states that `targets` take, and that fit them, into `states`, by name; no target is changed.

    Args:
        states: receives what is read.
        path: the checkpoint.
        step: the step in its name; None if the caller named the folder.
        targets: parts to be loaded, by name.
        rank: number of this process.
        optional: those of `targets` that stay unchanged if it does not hold them.

    Returns:
        The checkpoint's step.

    Raises:
        CheckpointError: it lacks a part, or holds one that fits another model or is not plain state.
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
        elif part in names.PER_RANK:
            logger.warning("%s of rank %d is not in %s; it stays unchanged", part, rank, path.name)
        else:
            raise CheckpointError(
                f"there is no {part!r} in it, as {checkpoint.program} saves nothing of the kind: go on without what "
                "needs it"
            )
    if rank == 0:
        _log_restored(checkpoint.program, path.name, sorted(states), checkpoint.notes)
    return checkpoint.step


def _log_restored(program: str, name: str, taken: list[str], notes: tuple[str, ...]) -> None:
    if "optimizer" not in taken:  # a single part was loaded, no run is resumed
        return
    logger.info("%s is a checkpoint of %s: %s are taken over", name, program, ", ".join(taken))
    for note in notes:
        logger.info("%s: %s", name, note)


# The parts that can be the model: all of it, or its adapter.
_MODEL_PARTS = ("model", "adapter_model")

# A checkpoint without these holds the model alone.
_RESUME_PARTS = ("optimizer", "scheduler", "rng")


def convert(source: str | Path, target: str | Path, *, prefix: str = "checkpoint") -> Path:
    """Convert the checkpoint of another program to `checkpoint-<step>` in the folder `target`; `source` is kept.

    It appears whole or not at all. It can be listed, verified, compared and resumed like any other. A model that is
    resumed from it gets its tied weights as it would from `source`. Plain files, such as `config.json`, are copied.

    Args:
        source: the other program's checkpoint.
        target: the folder of our checkpoints; made if it does not exist.
        prefix: the first part of the names of checkpoints.

    Returns:
        The new checkpoint's folder.

    Raises:
        CheckpointError: `source` lacks a part, is damaged, or holds anything but plain state; or `target` has a
            checkpoint of this step.
        OSError: it could not be written, or (`FolderInUseError`) a run saves to `target`.
    """
    _refuse_own_checkpoints(Path(source).expanduser().absolute(), prefix)
    checkpoint = read(source)
    directory = Path(target).expanduser().absolute()
    name = names.checkpoint_name(prefix, checkpoint.step)
    if reads.is_there(directory / name, follow=False):
        raise CheckpointError(f"{directory / name} exists; give another folder: nothing is overwritten")
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
        names.check_free(added, held)
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
        logger.info("%s holds the model only, and a run cannot resume from that", checkpoint.path.name)
        return *model, "trainer_state"
    # Missing ones raise an error that names their file.
    return tuple(dict.fromkeys((*model, *_RESUME_PARTS, *checkpoint.parts)))


def _write_part(checkpoint: ForeignCheckpoint, part: str, folder: Path) -> list[dict[str, dict[str, FileRecord]]]:
    written = []
    for rank in checkpoint.random_states if part in names.PER_RANK else (0,):
        held = Held(*codec.encode(part, checkpoint.state(part, rank)))
        written.append({part: {file.name: file.write(folder) for file in whole(part, rank, held)}})
    return written


def _copy_plain_files(checkpoint: ForeignCheckpoint, folder: Path) -> None:
    for name in checkpoint.plain_files:
        shutil.copyfile(checkpoint.path / name, folder / name)
    about = {"program": checkpoint.program, "name": checkpoint.path.name, "notes": list(checkpoint.notes)}
    (folder / NOTE).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
