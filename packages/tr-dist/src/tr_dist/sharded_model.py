"""Broadcast the values of rank 0, gather a sharded model's full state dict, drop its gradients, and generate in step.

Values are broadcast before or after the model is sharded. Ranks that share one model's weights must make the same
number of forward passes, also if a model has its own `generate`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

# Each rank takes its shard from the whole tensor, which all have. Torch before 2.7 sends those of rank 0.
_FROM_HERE: dict[str, Any] = (
    {"src_data_rank": None} if "src_data_rank" in inspect.signature(distribute_tensor).parameters else {}
)


def broadcast_values(model: nn.Module, device: torch.device) -> None:
    """Copy the parameters and buffers of rank 0 to every rank, one at a time, but those in parts. Collective."""
    for tensor in _tensors(model):
        if isinstance(tensor, DTensor):
            continue
        carried = tensor.detach().to(device).contiguous()
        dist.broadcast(carried, 0)
        if carried.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(carried)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers by name, not copied, including those left out of a state dict."""
    return dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))


def fill_shards(model: nn.Module, values: dict[str, torch.Tensor], device: torch.device, *, on_host: bool) -> None:
    """Copy the values, which only rank 0 has, into a sharded model. Collective; one tensor at a time.

    Args:
        model: sharded; on ranks without values it may be on the meta device.
        values: the result of `values_of` before the model was sharded; empty on the other ranks.
        device: the device of this rank.
        on_host: whether shards are kept in host memory.
    """
    if any(tensor.is_meta for tensor in _tensors(model)):
        model.to_empty(device="cpu" if on_host else device)
    state: dict[str, Any] = {name: values[name].detach() for name in model.state_dict() if name in values}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    for name, buffer in model.named_buffers():  # those that are not in a state dict, such as rotary frequencies
        carried = values[name].to(device) if name in values else buffer.to(device)
        carried = carried.clone(memory_format=torch.contiguous_format)
        dist.broadcast(carried, 0)
        buffer.copy_(carried)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())


def full_state_dict(model: nn.Module, *, keep: bool) -> dict[str, Any]:
    """Return a model's full state dict, in host memory. Collective; gathers one tensor at a time.

    Args:
        model: sharded.
        keep: whether this rank keeps the tensors; a rank that does not still takes part, and gets an empty dict.
    """
    state: dict[str, Any] = {}
    owners = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    first_names: dict[int, str] = {}  # tied parameters stay one tensor, and every rank gathers them once
    for name, value in model.state_dict().items():
        first = first_names.setdefault(owners.get(name, id(value)), name)
        if isinstance(value, DTensor) and first == name:
            whole = cast("DTensor", value.detach()).full_tensor()
            if keep:
                state[name] = whole.cpu()
        elif keep and isinstance(value, DTensor):
            state[name] = state[first]
        elif keep:
            state[name] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    return state


class FullStateModel:
    """A sharded model whose checkpoints hold the full state dict.

    Args:
        model: sharded.
        keep: whether this rank keeps the gathered tensors; one of these ranks writes them.
    """

    def __init__(self, model: nn.Module, *, keep: bool) -> None:
        self._model, self._keep = model, keep

    def state_dict(self) -> dict[str, Any]:
        """Return full tensors in host memory; empty on ranks that keep none. Collective."""
        return full_state_dict(self._model, keep=self._keep)

    def state_held_here(self) -> dict[str, Any]:
        """Return this rank's shards under the same names, also on ranks that keep none of `state_dict`."""
        return self._model.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load each parameter's shard from full tensors, which every rank has; sharded entries are loaded directly."""
        own = self._model.state_dict()
        for name, value in state_dict.items():
            mine = own.get(name)
            if isinstance(mine, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                whole = value.to(mine.device, mine.dtype)
                shard = distribute_tensor(whole, mine.device_mesh, mine.placements, **_FROM_HERE)
                state_dict = {**state_dict, name: shard}
        self._model.load_state_dict(state_dict)


def drop_held(model: nn.Module) -> None:
    """Drop what `fully_shard` holds of a step that does not end: gradients before their exchange, gathered parameters.

    torch has no function that drops gradients of before their exchange.
    """
    root: Any = model
    if hasattr(root, "reset_iter_state") and root._get_fsdp_state()._is_root:  # None before the first forward
        root.reset_iter_state()  # what is under way
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            state: Any = unit._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # older torch has one, or None
            for group in [state._fsdp_param_group] if groups is None else groups:
                if group is not None:
                    group._to_sharded()
                    for held in group.fsdp_params:
                        held.unsharded_accumulated_grad = None
                        if hasattr(held, "_unsharded_param"):  # gathered once
                            held._unsharded_param.grad = None


def synced_generation(model: nn.Module, total: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """Make a model's `generate` repeat its last forward after it is done, until all ranks are done.

    It replaces `generate` on the model, which is a collective call then. Nothing happens for a model without
    `generate`, or one that keeps in step by itself, as those of transformers do with `synced_gpus`, or contains such a
    model.

    Args:
        model: the model that generates, by calls of itself.
        total: sums a tensor over the ranks.
        device: the device of such tensors.
    """
    generate = getattr(model, "generate", None)
    if not callable(generate) or any(_is_synced(module) for module in model.modules()):
        return
    one, none = torch.ones((), device=device), torch.zeros((), device=device)

    @functools.wraps(generate)
    def together(*inputs: Any, **options: Any) -> Any:
        last: list[tuple[Any, Any]] = []

        def before_forward(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
            last[:] = [(inputs, options)]
            total(one)

        # Before all other hooks: those gather weights, and finished ranks join in only after this exchange.
        handle = model.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True)
        try:
            generated = generate(*inputs, **options)
        finally:
            handle.remove()
        while total(none) > 0:  # sync: generating reads tokens anyway
            if not last:
                raise RuntimeError(
                    f"{generate.__qualname__} made no forward on this rank, and others need its shards of the weights "
                    "for theirs; have it call the model on all ranks, or on none"
                )
            model(*last[0][0], **last[0][1])
        return generated

    cast("Any", together).goes_on = True
    cast("Any", model).generate = together


def _is_synced(module: nn.Module) -> bool:
    generate = getattr(module, "generate", None)
    if not callable(generate):
        return False
    return getattr(generate, "goes_on", False) or "synced_gpus" in inspect.signature(generate).parameters
