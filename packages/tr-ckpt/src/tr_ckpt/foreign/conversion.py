"""Write a checkpoint of another program as one of ours."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from tr_ckpt import catalogue, manifest, names, parts, reads
from tr_ckpt.errors import CheckpointError
from tr_ckpt.files import FileRecord
from tr_ckpt.folder_lock import locked
from tr_ckpt.foreign.checkpoint import ForeignCheckpoint
from tr_ckpt.foreign.reading import read
from tr_ckpt.foreign.taking_over import NOTE
from tr_ckpt.staging import Staging

logger = logging.getLogger(__name__)

# What stands for the model: all of it, or its adapter.
_MODEL = ("model", "adapter_model")

# Without these a checkpoint is one of the model alone.
_TO_GO_ON = ("optimizer", "scheduler", "rng")


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
    _refuse_what_is_no_foreign_checkpoint(Path(source).expanduser().absolute(), prefix)
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
        sequence = catalogue.next_sequence(directory, prefix)
        described = manifest.describe(checkpoint.step, checkpoint.world_size, written, sequence=sequence)
        manifest.write(staging.folder, described)
        return staging.commit()
    except BaseException:
        staging.discard()
        raise


def _refuse_what_is_no_foreign_checkpoint(source: Path, prefix: str) -> None:
    if reads.is_there(source / names.MANIFEST):
        raise CheckpointError(f"{source} is one of ours already: there is nothing to convert")
    if inside := [found for found in catalogue.find(source, prefix) if catalogue.is_foreign(found.path)]:
        raise CheckpointError(f"{source} holds checkpoints; give one of them, such as {inside[-1].path}")


def _parts_to_write(checkpoint: ForeignCheckpoint) -> tuple[str, ...]:
    model = [part for part in checkpoint.parts if part in _MODEL] or _MODEL[:1]
    if not set(_TO_GO_ON) & set(checkpoint.parts):
        logger.info("%s holds the model only, which no run can go on from", checkpoint.path.name)
        return *model, "trainer_state"
    # Those that are missing are an error, which names their file.
    return tuple(dict.fromkeys((*model, *_TO_GO_ON, *checkpoint.parts)))


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
