"""Check that the files of parts can be loaded, saved whole or in shards.

The check opens every file as a load would. It shows whether intact files can also be read. It reads headers
and JSON and follows references to tensors, but does not read the numbers of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tr_ckpt import codec, discovery, names, parts, tensor_file
from tr_ckpt.errors import CheckpointError, UnreadableError
from tr_ckpt.manifest import Manifest
from tr_ckpt.sharded import reading, shard_index
from tr_ckpt.sharded.reading import SlicedFiles
from tr_ckpt.sharded.shard_index import Index


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
    if name.endswith(names.INDEX_SUFFIX):
        _open_shards(folder, name, owned)
    elif name.endswith(".safetensors"):
        tensor_file.check(folder / name)
    elif name.endswith(".json"):
        stem = name.removesuffix(".json")
        encoded = parts.read_json(folder / name)
        if names.index_name(part) in owned:
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
    """Return a lookup of tensors by name: an empty one, or a view of the file where it may be a NumPy array's bytes."""
    empty: dict[torch.dtype, torch.Tensor] = {}

    def find(name: Any) -> torch.Tensor:
        if name not in index:
            raise CheckpointError(f"the tensor {name!r:.80} is in no file of it")
        saved = index[name]
        if len(saved.chunks) != 1 or saved.dtype != torch.uint8:
            return empty.setdefault(saved.dtype, torch.empty(0, dtype=saved.dtype))
        [chunk] = saved.chunks
        return opened.slice(name, chunk, (0,) * len(chunk.size), chunk.size)

    return find
