"""`trainer ckpt export` and `import`: exchange checkpoints with other programs.

`export` writes a model folder that `from_pretrained` loads. `import` converts a checkpoint of another program to this
format.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

import torch

from tr_ckpt import files, names, processes, staging
from tr_ckpt.command import selection
from tr_ckpt.command.terminal import say
from tr_ckpt.errors import CheckpointError, DamagedCheckpointError
from tr_ckpt.hf_import import convert
from tr_ckpt.sharded import export
from tr_log.formatting import size

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_MODEL_FILES = ("config.json", "model.safetensors", "model.safetensors.index.json")


def run_export(arguments: argparse.Namespace) -> int:
    """Write the model of a checkpoint, with the files beside it, to a new folder; `export` verifies them."""
    target = Path(arguments.target).expanduser().absolute()
    _check_target(target, arguments.prefix, overwrite=arguments.overwrite)
    entry = selection.select_one(Path(arguments.checkpoint).expanduser(), arguments.prefix)
    for left in staging.cut_short(target.parent, "writing", target.name):
        staging.discard(left)
    fresh = processes.temporary(target.parent, "writing", target.name) if arguments.overwrite else target
    try:
        made = export(
            entry.found.path,
            fresh,
            dtype=_DTYPES.get(arguments.dtype),
            max_shard_bytes=arguments.max_shard_size,
            part=arguments.part,
        )
    except DamagedCheckpointError as error:
        raise CheckpointError(f"{error}; `trainer ckpt verify` tells which other one is whole") from error
    else:
        made = [path.relative_to(fresh) for path in made]
        if fresh != target:
            _replace(target, fresh)
    finally:
        if fresh != target and fresh.exists():
            staging.discard(fresh)
        processes.release(fresh)
    say(f"{target}: {arguments.part} of {entry.found.name}, step {entry.step}")
    for path in made:
        say(f"  {path}  {size((target / path).stat().st_size)}")
    if Path("config.json") not in made:
        say("It holds no config.json: from_pretrained needs one, and the checkpoint has none.")
    return 0


def _check_target(target: Path, prefix: str, *, overwrite: bool) -> None:
    """Refuse a target that exists, unless it is a model folder and may be replaced.

    Raises:
        CheckpointError: it exists.
    """
    if not os.path.lexists(target) or (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists; give another folder, or --overwrite to replace it")
    kept = [path.name for path in target.iterdir() if names.step_of(path.name, prefix) is not None] or [
        name for name in (names.MANIFEST, "trainer_state.json") if (target / name).exists()
    ]
    if target.is_symlink() or kept or not any((target / name).exists() for name in _MODEL_FILES):
        what = f"it holds {kept[0]}" if kept else "it is not a model folder"
        raise CheckpointError(f"{target} is not replaced: {what}; give another folder")


def _replace(target: Path, fresh: Path) -> None:
    """Replace `target` by `fresh`; the old folder is removed afterwards."""
    aside = processes.temporary(target.parent, "removed", target.name)
    try:
        if target.exists():
            files.rename(target, aside)
        try:
            files.rename(fresh, target)
        except OSError:
            if aside.exists():
                files.rename(aside, target)
            raise
        files.sync_folder(target.parent)
    finally:
        if target.exists() and aside.exists():
            staging.discard(aside)
        processes.release(aside)
    for left in staging.cut_short(target.parent, "removed", target.name):
        staging.discard(left)


def run_import(arguments: argparse.Namespace) -> int:
    """Convert a checkpoint and print the result."""
    logger = logging.getLogger("tr_ckpt.hf_import")
    handler = logging.StreamHandler()  # shows what the conversion logs
    handler.setFormatter(logging.Formatter("%(message)s"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        folder = convert(arguments.source, arguments.target, prefix=arguments.prefix)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    described = selection.select_one(folder, arguments.prefix).described
    assert described is not None  # it was just written
    held = " ".join(sorted(described.parts))
    say(f"{folder}: step {described.step}, {size(described.total_bytes)}, parts {held}")
    return 0
