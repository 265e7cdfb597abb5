"""Read a part into another number of ranks, or another layout, than it was saved with.

What of which chunk goes where is planned by torch.distributed.checkpoint; only those slices are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tr_ckpt import distributed_tensor, plain_file, reads, tree
from tr_ckpt.errors import CheckpointError
from tr_ckpt.sharded import shard_index
from tr_ckpt.sharded.shard_index import Chunk, Index, SavedTensor
from tr_ckpt.sharded.target_layout import Layout


def read(folder: Path, part: str, files: Collection[str], encoded: Any, layout: Layout) -> Any:
    """Return the state of a part, its tensors in host memory; of those that become DTensors this rank's shard.

    Every rank reads for itself; nothing is communicated.

    Args:
        folder: the checkpoint, verified.
        part: its name.
        files: those of the part.
        encoded: what the part's JSON file holds.
        layout: of the state that will be loaded.

    Raises:
        CheckpointError: the files do not fit together.
    """
    distributed_tensor.require()
    index = read_index(folder, part, files)
    tensors = {name: layout.empty(name, saved) for name, saved in index.items()}
    with SlicedFiles(folder) as opened:
        fill(tensors, index, opened)

    def tensor(name: str) -> torch.Tensor:
        if name not in tensors:
            raise CheckpointError(f"the tensor {name!r} is in no file of it")
        return tensors[name]

    try:
        return tree.decode(encoded, tensor)
    except (CheckpointError, RecursionError) as error:
        raise CheckpointError(f"{part}.json: {error}") from error


def read_index(folder: Path, part: str, files: Collection[str]) -> Index:
    """Return where the tensors of a part are, whether it was saved in shards or whole.

    Raises:
        CheckpointError: its index or its file is not what a save writes.
    """
    if (name := shard_index.file_name(part)) in files:
        return shard_index.read(folder / name, files)
    return shard_index.of_plain_file(folder / f"{part}.safetensors")


def fill(tensors: Mapping[str, torch.Tensor], index: Index, opened: SlicedFiles) -> None:
    """Copy from the files what belongs in `tensors`: all of a plain one, this rank's shard of a DTensor.

    Raises:
        CheckpointError: a file does not hold what the index says, or leaves part of a tensor empty.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner

    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), _metadata(index), is_coordinator=False)
    filled = dict.fromkeys(tensors, 0)
    for item in planner.create_local_plan().items:
        name, offset = item.storage_index.fqn, item.storage_index.offset
        chunk = next(chunk for chunk in index[name].chunks if chunk.offset == tuple(offset or ()))
        values = opened.slice(name, chunk, tuple(item.storage_offsets), tuple(item.lengths))
        if values.dtype != index[name].dtype:
            raise CheckpointError(f"{chunk.file}: {name!r} is of {values.dtype}, not {index[name].dtype}")
        with torch.no_grad():
            planner.resolve_tensor(item).copy_(values)
        filled[name] += values.numel()
    for name, tensor in tensors.items():
        wanted = _local_numbers(tensor)
        if filled[name] != wanted:
            raise CheckpointError(f"the files hold {filled[name]} of the {wanted} numbers wanted of {name!r}")


class SlicedFiles:
    """Safetensors files of a checkpoint, each opened when something of it is first wanted. A context manager.

    Attributes:
        bytes_read: how much was taken out of them.
    """

    def __init__(self, folder: Path) -> None:
        self.bytes_read = 0
        self._folder = folder
        self._opened: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> SlicedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()
        self._stack.close()

    def slice(self, name: str, chunk: Chunk, offset: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """Return a box of a chunk: `size` numbers from `offset` on, counted in the chunk.

        It is a view of the mapped file: copy it before the file is closed.

        Raises:
            CheckpointError: the file is no safetensors file or does not hold the chunk.
            UnreadableError: it cannot be read.
        """
        try:
            if chunk.file not in self._opened:
                plain_file.require(self._folder / chunk.file)
                file = reads.tensors(self._folder / chunk.file)
                self._opened[chunk.file] = self._stack.enter_context(file)
            view = self._opened[chunk.file].get_slice(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{chunk.file}: {error}") from error
        if tuple(view.get_shape()) != chunk.size:
            raise CheckpointError(f"{chunk.file}: {name!r} has the shape {view.get_shape()}, not {list(chunk.size)}")
        box = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
        values = view[box] if box else view[...]
        self.bytes_read += values.numel() * values.element_size()
        return values


def whole(name: str, saved: SavedTensor, opened: SlicedFiles) -> torch.Tensor:
    """Return all of one tensor, in host memory of its own.

    Raises:
        CheckpointError: the files do not hold it.
    """
    tensor = torch.empty(saved.shape, dtype=saved.dtype)
    fill({name: tensor}, {name: saved}, opened)
    return tensor


def _local_numbers(tensor: Any) -> int:
    if not distributed_tensor.is_distributed(tensor):
        return tensor.numel()
    return tensor.to_local().numel() if tensor.device_mesh.get_coordinate() is not None else 0


def _metadata(index: Index) -> Any:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    return Metadata(
        {
            name: TensorStorageMetadata(
                TensorProperties(dtype=saved.dtype),
                torch.Size(saved.shape),
                [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size)) for chunk in saved.chunks],
            )
            for name, saved in index.items()
        }
    )
