"""Say how the tensors of a part are laid out over the ranks of the run that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tr_ckpt.distributed_tensor import find, is_distributed
from tr_ckpt.errors import CheckpointError
from tr_ckpt.sharded.shard_index import SavedTensor


@dataclass(frozen=True)
class Layout:
    """Which DTensor each tensor of a state is to be like.

    Attributes:
        like: DTensors by the names of the tensors.
        parameters: all parameters of an optimizer that has DTensors among them, by their keys in its state. The
            state of a DTensor is laid out like it where it has its shape, and is whole on every rank where it has
            another. What an optimizer will hold is thus known before its first step has made it.
    """

    like: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.like or self.parameters)

    def empty(self, name: str, saved: SavedTensor) -> torch.Tensor:
        """Return a tensor of the saved shape and dtype in host memory, to be filled; of a DTensor its own shard.

        Where nothing is known of `name`, or it has another shape, the tensor is a plain one.

        Raises:
            CheckpointError: an optimizer on a mesh has no parameter to which the tensor belongs.
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
        for end in range(len(steps) - 1, 1, -1):  # names of parameters hold dots; the longest that fits is it
            if (parameter := self.parameters.get(".".join(steps[1:end]))) is not None:
                return parameter
        return None


def layout_of(target: Any, in_shards: bool) -> Layout:
    """Return how the tensors of `target` are laid out; an empty one if it holds no DTensor.

    Args:
        target: a part that is about to be loaded; None for one that is only read. A module and an optimizer are
            looked at; of anything else the `state_dict` is taken, and only if what was saved is in shards, as it may
            cost what is not worth it.
        in_shards: whether what was saved is.
    """
    if target is None:
        return Layout()
    own = getattr(target, "tensor_layout", None)
    if own is not None:
        return own()
    if isinstance(target, torch.nn.Module):
        held = any(is_distributed(tensor) for tensor in (*target.parameters(), *target.buffers()))
        return Layout(dict(find(target.state_dict()))) if held else Layout()
    if isinstance(target, torch.optim.Optimizer):
        parameters = [parameter for group in target.param_groups for parameter in group["params"]]
        keyed = {str(number): parameter for number, parameter in enumerate(parameters)}
        return optimizer_layout(target, keyed)
    return Layout(dict(find(target.state_dict()))) if in_shards else Layout()


def optimizer_layout(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> Layout:
    """Return the layout of an optimizer's state, whose parameters have the given keys."""
    if not any(map(is_distributed, parameters.values())):
        return Layout()
    state = {key: optimizer.state[parameter] for key, parameter in parameters.items() if parameter in optimizer.state}
    return Layout(dict(find(state, ("state",))), parameters)


def _belongs_on_mesh(saved: SavedTensor, parameter: Any) -> bool:
    if saved.distributed is None:  # from a run without a mesh: all but single numbers, such as a count of steps
        return bool(saved.shape)
    like_parameter = parameter is not None and tuple(parameter.shape) == saved.shape
    return saved.distributed or (bool(saved.shape) and like_parameter)


def _replicated(saved: SavedTensor, parameter: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    whole = torch.empty(saved.shape, dtype=saved.dtype)
    return DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
