"""Say how the loading run distributes its tensors over the ranks, and fill this rank's shards of them.

torch.distributed.checkpoint plans which slice of which chunk is needed. Only those slices are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tr_ckpt.errors import CheckpointError
from tr_ckpt.shard_index import SavedTensor
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

    def empty(self, name: str, saved: SavedTensor) -> torch.Tensor | None:
        """Return an uninitialised DTensor of the saved shape and dtype, its shard in host memory.

        None for a tensor that will be a plain one: its name is unknown, or it has another shape.

        Raises:
            CheckpointError: an optimizer on a mesh has no parameter for the tensor.
        """
        like = self.like.get(name)
        if like is not None and tuple(like.shape) == saved.shape:
            return torch.empty_like(like, dtype=saved.dtype, device="cpu", requires_grad=False)
        parameter = self._parameter(name)
        if not self.parameters or not _belongs_on_mesh(saved, parameter):
            return None
        if parameter is None:
            raise CheckpointError(
                f"{name!r} is of no parameter of this optimizer, whose parameters are DTensors; save and restore "
                "both with the parts that tr_ckpt.sharded.stateful(model, optimizer) returns, or neither"
            )
        if not is_distributed(parameter):
            return None
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


def fill(name: str, saved: SavedTensor, tensor: Any, read: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Copy the saved numbers into this rank's shard of a DTensor, and return the DTensor. Not collective.

    Args:
        name: of the tensor.
        saved: where its numbers are.
        tensor: the DTensor, of the saved shape and dtype.
        read: returns a slice of a chunk, as `CheckpointReader.slice` does.

    Raises:
        CheckpointError: a file does not hold what it should, or part of the shard stays empty.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    chunks = [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.size)) for chunk in saved.chunks]
    placed = TensorStorageMetadata(TensorProperties(dtype=saved.dtype), torch.Size(saved.shape), chunks)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner({name: tensor}, Metadata({name: placed}), is_coordinator=False)
    filled = 0
    for item in planner.create_local_plan().items:
        chunk = next(chunk for chunk in saved.chunks if chunk.offset == tuple(item.storage_index.offset or ()))
        values = read(name, saved, chunk, tuple(item.storage_offsets), tuple(item.lengths))
        with torch.no_grad():
            planner.resolve_tensor(item).copy_(values)
        filled += values.numel()
    is_on_mesh = tensor.device_mesh.get_coordinate() is not None
    wanted = tensor.to_local().numel() if is_on_mesh else 0
    if filled != wanted:
        raise CheckpointError(f"the files hold {filled} of the {wanted} numbers wanted of {name!r}")
    return tensor
