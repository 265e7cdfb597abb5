"""Read the files of parts, saved whole or in shards: to restore a part, or to check that it can be loaded.

The check opens every file as a load would. It shows whether intact files can also be read. It reads headers
and JSON and follows references to tensors, but does not read the numbers of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tr_ckpt import codec, discovery, parts, tensor_file
from tr_ckpt.errors import CheckpointError, UnreadableError
from tr_ckpt.manifest import Manifest
from tr_ckpt.sharded import reading, shard_index
from tr_ckpt.sharded.reading import SlicedFiles, layout_of
from tr_ckpt.sharded.shard_index import Index
from tr_ckpt.tensor_file import may_exist


def read_part(folder: Path, part: str, rank: int, described: Manifest, target: Any) -> Any:
    """Return the state of a part for `target`, its tensors in host memory; of a DTensor this rank's shards only.

    Raises:
        CheckpointError: its files are not in the format of a save, or do not fit `target`.
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

    One rank verifies each file of shards, because reading all of them takes long. Rank 0 verifies all other files, and
    each rank those of them that it will load.
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


_SHARDS_SUFFIX = ".shards.json"


def verify(folder: Path, described: Manifest) -> None:
    """Read every file, compare it with the manifest, and open it as a load would.

    Raises:
        DamagedCheckpointError: the message names every wrong file.
        UnreadableError: a file cannot be read.
    """
    discovery.verify(folder, described)
    discovery.raise_if_damaged(problems(folder, described))


def problems(folder: Path, described: Manifest) -> list[str]:
    """Return why files of parts cannot be loaded although their bytes are intact, one sentence a file.

    Raises:
        UnreadableError: a file cannot be read.
    """
    found = []
    for part, owned in sorted(described.parts.items()):
        for name in owned:
            try:
                _open(folder, part, name, owned)
            except UnreadableError:
                raise
            except CheckpointError as error:
                found.append(str(error) if name in str(error) else f"{name} cannot be loaded: {error}")
            except (SafetensorError, OSError, RecursionError) as error:
                found.append(f"{name} cannot be loaded: {error}")
    return found


def _open(folder: Path, part: str, name: str, owned: Collection[str]) -> None:
    if name.endswith(_SHARDS_SUFFIX):
        _open_shards(folder, name, owned)
    elif name.endswith(".safetensors"):
        tensor_file.check(folder / name)
    elif name.endswith(".json"):
        stem = name.removesuffix(".json")
        encoded = parts.read_json(folder / name)
        if shard_index.file_name(part) in owned:
            with SlicedFiles(folder) as opened:
                codec.decode(encoded, _finder(reading.read_index(folder, part, owned), opened))
        else:
            index = shard_index.of_plain_file(folder / f"{stem}.safetensors")
            with SlicedFiles(folder) as opened:
                codec.decode(encoded, _finder(index, opened))


def _open_shards(folder: Path, name: str, owned: Collection[str]) -> None:
    index = shard_index.read(folder / name, owned)
    with SlicedFiles(folder) as opened:
        for of, saved in index.items():
            for chunk in saved.chunks:
                values = opened.slice(of, chunk, (0,) * len(chunk.size), chunk.size)
                if values.dtype != saved.dtype:
                    raise CheckpointError(f"{chunk.file}: {of!r} is of {values.dtype}, not {saved.dtype}")


def _finder(index: Index, opened: SlicedFiles) -> Callable[[str], torch.Tensor]:
    """Return a lookup of tensors by name: a view of the file where a tensor is contiguous there, else an empty one."""

    def find(name: Any) -> torch.Tensor:
        if name not in index:
            raise CheckpointError(f"the tensor {name!r:.80} is in no file of it")
        saved = index[name]
        if len(saved.chunks) != 1:
            return torch.empty(0, dtype=saved.dtype)
        [chunk] = saved.chunks
        return opened.slice(name, chunk, (0,) * len(chunk.size), chunk.size)

    return find
