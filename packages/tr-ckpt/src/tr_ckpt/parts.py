"""Write and read one part of a checkpoint: `NAME.json`, and `NAME.safetensors` if its state holds tensors."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from tr_ckpt import files, strict_json, tensor_file, tree
from tr_ckpt.errors import CheckpointError
from tr_ckpt.files import FileRecord
from tr_ckpt.names import MANIFEST

# Parts that differ between the ranks: each rank has its own files.
PER_RANK = ("rng",)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def check_names(names: Iterable[str]) -> None:
    """Refuse names that cannot be those of files.

    Raises:
        CheckpointError: a name holds other characters, is taken, or differs from another in case alone.
    """
    seen: dict[str, str] = {Path(MANIFEST).stem: Path(MANIFEST).stem}
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise CheckpointError(
                f"the name {name!r} cannot name a file; use letters, digits, '_', '-' and, not first, '.'"
            )
        if any(re.fullmatch(rf"{per_rank}-\d+", name) for per_rank in PER_RANK):
            raise CheckpointError(f"the part name {name!r} is that of one rank's files; give another")
        if (other := seen.setdefault(name.lower(), name)) != name or name == Path(MANIFEST).stem:
            raise CheckpointError(f"the part name {name!r} is taken by {other!r}; some file systems ignore case")


def check_free(taken: Iterable[str], part_names: Iterable[str], world_size: int) -> None:
    """Refuse files that the caller added under the names of a part's files.

    Raises:
        CheckpointError: the message names the file and the part.
    """
    owners = {MANIFEST.lower(): "the manifest"}
    for name in part_names:
        for rank in range(world_size):
            for suffix in ("json", "safetensors"):
                owners[f"{stem(name, rank)}.{suffix}".lower()] = f"the part {name!r}"
    for file in taken:
        if (owner := owners.get(file.lower())) is not None:
            raise CheckpointError(f"write_extra made {file!r}, which is where {owner} goes; give it another name")


def stem(name: str, rank: int) -> str:
    """Return the file name, without suffix, of a part."""
    return f"{name}-{rank}" if name in PER_RANK else name


def write(folder: Path, name: str, rank: int, state: Any) -> dict[str, FileRecord]:
    """Write the state of a part into `folder` and return what was written, by file name.

    State made of JSON's own values is written with sorted keys; otherwise the order of every dict is kept.

    Raises:
        CheckpointError: the state holds something that cannot be saved.
        OSError: a file exists or cannot be written.
    """
    encoder = tree.Encoder(name)
    try:
        encoded = encoder.encode(state)
        text = json.dumps(encoded, indent=2, sort_keys=encoder.plain, allow_nan=False)
    except RecursionError:
        raise CheckpointError(f"{name} is nested too deeply to be saved") from None
    written = {}
    if encoder.tensors:
        file = f"{stem(name, rank)}.safetensors"
        written[file] = tensor_file.write(folder / file, encoder.tensors)
    file = f"{stem(name, rank)}.json"
    written[file] = files.write_file(folder / file, [text.encode(), b"\n"])
    return written


def read(folder: Path, name: str, rank: int) -> Any:
    """Return the state of a part, its tensors in host memory. Its files must have been verified.

    Raises:
        CheckpointError: its files are not what this version's `write` writes.
    """
    path = folder / f"{stem(name, rank)}.json"
    try:
        encoded = strict_json.loads(path.read_bytes().decode())
    except (OSError, UnicodeDecodeError, CheckpointError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}") from error
    path = path.with_name(f"{stem(name, rank)}.safetensors")
    tensors = tensor_file.read(path) if path.exists() else {}

    def tensor(name: str) -> torch.Tensor:
        if name not in tensors:
            raise CheckpointError(f"the tensor {name!r} is not in {path.name}")
        return tensors[name]

    try:
        return tree.decode(encoded, tensor)
    except (CheckpointError, RecursionError) as error:
        raise CheckpointError(f"{stem(name, rank)}.json: {error}") from error
