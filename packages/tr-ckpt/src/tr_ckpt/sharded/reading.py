"""Read a part into another number of ranks, or another layout, than it was saved with.

`Layout` describes how the loading run distributes its tensors over the ranks. torch.distributed.checkpoint plans
which slice of which chunk is needed. Only those slices are read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from tr_ckpt import codec, names, reads, tensor_file, untrusted
from tr_ckpt.errors import CheckpointError
from tr_ckpt.sharded import shard_index
from tr_ckpt.sharded.shard_index import Chunk, Index, SavedTensor
from tr_ckpt.tensor_file import find_distributed, is_distributed


@dataclass(frozen=True)
class Layout:
    """The DTensors whose layout the tensors of a state will have.

    Attributes:
        like: DTensors by the names of the tensors.
        parameters: all parameters of an optimizer that has DTensors among them, by their keys in its state. State
            with the shape of its DTensor has the same layout; state of another shape is replicated. This gives the
            layout before the optimizer's first step has made the state.
    """

    like: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.like or self.parameters)

    def empty(self, name: str, saved: SavedTensor) -> torch.Tensor:
        """Return an uninitialised tensor of the saved shape and dtype in host memory; for a DTensor only its shard.

        If `name` is unknown, or has another shape, the tensor is a plain one.

        Raises:
            CheckpointError: an optimizer on a mesh has no parameter for the tensor.
        """
        like = self.like.get(name)
        if like is not None and tuple(like.shape) == saved.shape:
            return torch.empty_like(like, dtype=saved.dtype, device="cpu", requires_grad=False)
        parameter = self._parameter(name)
        if not self.parameters or not _belongs_on_mesh(saved, parameter):
            return torch.empty(saved.shape, dtype=saved.dtype)
        if parameter is None:
            raise CheckpointError(
                f"{name!r} is of no parameter of this optimizer, whose parameters are DTensors; save and restore "
                "both with the parts that tr_ckpt.sharded.stateful(model, optimizer) returns, or neither"
            )
        if not is_distributed(parameter):
            return torch.empty(saved.shape, dtype=saved.dtype)
        if tuple(parameter.shape) == saved.shape:
            return torch.empty_like(parameter, dtype=saved.dtype, device="cpu", requires_grad=False)
        return _replicated(saved, parameter)

    def _parameter(self, name: str) -> Any:
        steps = name.split(".")
        if steps[0] != "state":
            return None
        for end in range(len(steps) - 1, 1, -1):  # names of parameters contain dots; use the longest that fits
            if (parameter := self.parameters.get(".".join(steps[1:end]))) is not None:
                return parameter
        return None


def layout_of(target: Any) -> Layout:
    """Return the layout of the tensors of `target`; an empty one if it holds no DTensor. Collective.

    Args:
        target: a part to load; None for one that is only read. Modules and optimizers are inspected. For other parts
            `state_dict` is called, which may be expensive, and collective.
    """
    if target is None:
        return Layout()
    own = getattr(target, "tensor_layout", None)
    if own is not None:
        return own()
    if isinstance(target, torch.nn.Module):
        held = any(is_distributed(tensor) for tensor in (*target.parameters(), *target.buffers()))
        return Layout(dict(find_distributed(target.state_dict()))) if held else Layout()
    if isinstance(target, torch.optim.Optimizer):
        parameters = [parameter for group in target.param_groups for parameter in group["params"]]
        keyed = {str(number): parameter for number, parameter in enumerate(parameters)}
        return optimizer_layout(target, keyed)
    return Layout(dict(find_distributed(target.state_dict())))


def optimizer_layout(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> Layout:
    """Return the layout of the state of an optimizer, given its parameters by their keys."""
    if not any(map(is_distributed, parameters.values())):
        return Layout()
    state = {key: optimizer.state[parameter] for key, parameter in parameters.items() if parameter in optimizer.state}
    return Layout(dict(find_distributed(state, ("state",))), parameters)


def _belongs_on_mesh(saved: SavedTensor, parameter: Any) -> bool:
    if saved.distributed is None:  # from a run without a mesh: all but single numbers, such as a step count
        return bool(saved.shape)
    like_parameter = parameter is not None and tuple(parameter.shape) == saved.shape
    return saved.distributed or (bool(saved.shape) and like_parameter)


def _replicated(saved: SavedTensor, parameter: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    whole = torch.empty(saved.shape, dtype=saved.dtype)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)


def read(folder: Path, part: str, files: Collection[str], encoded: Any, layout: Layout) -> Any:
    """Return the state of a part, its tensors in host memory; for a DTensor this rank's shard.

    Every rank reads for itself. Not collective.

    Args:
        folder: the checkpoint, verified.
        part: its name.
        files: the files of the part.
        encoded: the content of the part's JSON file.
        layout: the layout of the state to load.

    Raises:
        CheckpointError: the files do not fit together.
    """
    tensor_file.require_distributed()
    index = read_index(folder, part, files)
    tensors = {name: layout.empty(name, saved) for name, saved in index.items()}
    with SlicedFiles(folder) as opened:
        fill(tensors, index, opened)

    def tensor(name: str) -> torch.Tensor:
        if name not in tensors:
            raise CheckpointError(f"the tensor {name!r} is in no file of it")
        return tensors[name]

    try:
        return codec.decode(encoded, tensor)
    except (CheckpointError, RecursionError) as error:
        raise CheckpointError(f"{part}.json: {error}") from error


def read_index(folder: Path, part: str, files: Collection[str]) -> Index:
    """Return the location of each tensor of a part, saved in shards or whole.

    Raises:
        CheckpointError: its index or its file is not in the format of a save.
    """
    if (name := names.index_name(part)) in files:
        return shard_index.read(folder / name, files)
    return shard_index.of_plain_file(folder / f"{part}.safetensors")


def fill(tensors: Mapping[str, torch.Tensor], index: Index, opened: SlicedFiles) -> None:
    """Copy into `tensors` from the files: all of a plain tensor, this rank's shard of a DTensor.

    Raises:
        CheckpointError: a file does not match the index, or leaves part of a tensor empty.
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
    """Safetensors files of a checkpoint, each opened at its first use. A context manager.

    Attributes:
        bytes_read: how many bytes were read.
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
        """Return a box of a chunk: `size` numbers from `offset` on, relative to the chunk.

        It is a view of the mapped file: copy it before the file is closed.

        Raises:
            CheckpointError: the file is not a safetensors file or does not hold the chunk.
            UnreadableError: it cannot be read.
        """
        try:
            if chunk.file not in self._opened:
                untrusted.require_regular_file(self._folder / chunk.file)
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
    """Return all of one tensor, copied to host memory.

    Raises:
        CheckpointError: the files do not hold it.
    """
    tensor = torch.empty(saved.shape, dtype=saved.dtype)
    fill({name: tensor}, {name: saved}, opened)
    return tensor


def _local_numbers(tensor: Any) -> int:
    if not tensor_file.is_distributed(tensor):
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
