"""Read a part of a checkpoint, whole or in shards, into a part of a run, on a mesh or not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tr_ckpt import parts
from tr_ckpt.distributed_tensor import may_exist
from tr_ckpt.errors import CheckpointError
from tr_ckpt.manifest import Manifest
from tr_ckpt.sharded import reading, shard_index
from tr_ckpt.sharded.target_layout import layout_of


def read_part(folder: Path, part: str, rank: int, described: Manifest, target: Any) -> Any:
    """Return the state of a part for `target`, its tensors in host memory; of DTensors this rank's shards.

    Raises:
        CheckpointError: its files are not what a save writes, or do not fit `target`.
    """
    files = described.parts[part]
    in_shards = shard_index.file_name(part) in files
    if part not in parts.PER_RANK and (in_shards or may_exist()):
        layout = layout_of(target, in_shards)
        if in_shards or layout:
            return reading.read(folder, part, files, parts.read_json(folder / f"{part}.json"), layout)
    return parts.read(folder, part, rank)


def refuse_pickled(source: Path) -> None:
    """Refuse a checkpoint of torch.distributed.checkpoint itself.

    Raises:
        CheckpointError: `source` is one.
    """
    if (source / ".metadata").exists() and any(source.glob("*.distcp")):
        raise CheckpointError(
            f"{source} was written by torch.distributed.checkpoint; its .metadata is a pickle, which can run anything "
            "and is not read — if you trust it, load it with torch.distributed.checkpoint.load, then save with this"
        )


def files_to_verify(described: Manifest, targets: Iterable[str], rank: int, world_size: int) -> list[str]:
    """Return the files that a rank verifies before `targets` are loaded.

    Each file of shards is verified by one rank, as reading all of them takes long; rank 0 verifies all other files,
    and each rank what it is about to load of those.
    """
    shards = [
        name
        for part, names in sorted(described.parts.items())
        if shard_index.file_name(part) in names
        for name in names
        if name.startswith(f"{part}-shard-")
    ]
    mine = set(shards[rank::world_size])
    stems = tuple(f"{parts.stem(part, rank)}." for part in targets)
    return [
        name
        for name in described.files
        if name in mine or (name not in shards and (rank == 0 or name.startswith(stems)))
    ]
