"""Open the files of a checkpoint as a load would, to see whether they can be read, and not only that they are whole.

Headers and JSON are read, and what refers to tensors is followed; the numbers of tensors are not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tr_ckpt import catalogue, parts, tensor_file, tree
from tr_ckpt.errors import CheckpointError, UnreadableError
from tr_ckpt.manifest import Manifest
from tr_ckpt.sharded import reading, shard_index
from tr_ckpt.sharded.reading import SlicedFiles
from tr_ckpt.sharded.shard_index import Index

_SHARDS = ".shards.json"


def verify(folder: Path, described: Manifest) -> None:
    """Read every file, compare it with the manifest, and open it as a load would.

    Raises:
        DamagedCheckpointError: the message names every file that is wrong.
        UnreadableError: one cannot be read.
    """
    catalogue.verify(folder, described)
    catalogue.raise_if_any(problems(folder, described))


def problems(folder: Path, described: Manifest) -> list[str]:
    """Return why files of parts, whose bytes are those that were written, cannot be loaded, one sentence a file.

    Raises:
        UnreadableError: one cannot be read.
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
    if name.endswith(_SHARDS):
        _open_shards(folder, name, owned)
    elif name.endswith(".safetensors"):
        tensor_file.check(folder / name)
    elif name.endswith(".json"):
        stem = name.removesuffix(".json")
        encoded = parts.read_json(folder / name)
        if shard_index.file_name(part) in owned:
            with SlicedFiles(folder) as opened:
                tree.decode(encoded, _finder(reading.read_index(folder, part, owned), opened))
        else:
            index = shard_index.of_plain_file(folder / f"{stem}.safetensors")
            with SlicedFiles(folder) as opened:
                tree.decode(encoded, _finder(index, opened))


def _open_shards(folder: Path, name: str, owned: Collection[str]) -> None:
    index = shard_index.read(folder / name, owned)
    with SlicedFiles(folder) as opened:
        for of, saved in index.items():
            for chunk in saved.chunks:
                values = opened.slice(of, chunk, (0,) * len(chunk.size), chunk.size)
                if values.dtype != saved.dtype:
                    raise CheckpointError(f"{chunk.file}: {of!r} is of {values.dtype}, not {saved.dtype}")


def _finder(index: Index, opened: SlicedFiles) -> Callable[[str], torch.Tensor]:
    """Return what finds a tensor by its name: a view of its file where it lies in one piece, else an empty one."""

    def find(name: Any) -> torch.Tensor:
        if name not in index:
            raise CheckpointError(f"the tensor {name!r:.80} is in no file of it")
        saved = index[name]
        if len(saved.chunks) != 1:
            return torch.empty(0, dtype=saved.dtype)
        [chunk] = saved.chunks
        return opened.slice(name, chunk, (0,) * len(chunk.size), chunk.size)

    return find
