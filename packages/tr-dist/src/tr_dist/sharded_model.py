"""Bring the values of rank 0 to every rank, gather a sharded model's full state, and generate in step.

Values are brought before or after the model is sharded. Ranks that share one model's weights must make equally many
forward passes, also where a model generates in its own way.
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
from torch.distributed.tensor import DTensor, distribute_tensor


def broadcast_values(model: nn.Module, device: torch.device) -> None:
    """Give every rank the parameters and buffers of rank 0, one at a time. Collective; on whole tensors."""
    for tensor in _tensors(model):
        carried = tensor.detach().to(device).contiguous()
        dist.broadcast(carried, 0)
        if carried.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(carried)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers by name, those left out of a state dict too, as they are."""
    return dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))


def fill_shards(model: nn.Module, values: dict[str, torch.Tensor], device: torch.device, *, on_host: bool) -> None:
    """Give a divided model its values, which rank 0 alone has. Collective; one tensor at a time.

    Args:
        model: divided; on ranks that have no values it may be on the meta device.
        values: what `values_of` returned before the model was divided; empty on the other ranks.
        device: where this rank computes.
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
    """Return a model's state dict with whole tensors, in host memory. Collective; gathers one tensor at a time.

    Args:
        model: divided.
        keep: whether this rank keeps them; a rank that does not takes part, and gets an empty dict.
    """
    state: dict[str, Any] = {}
    owners = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    first_names: dict[int, str] = {}  # tied parameters stay one tensor, and every rank takes part once for all of them
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
    """A divided model whose state, as a checkpoint has it, is whole.

    Args:
        model: divided.
        keep: whether this rank keeps what is gathered; one of them writes it.
    """

    def __init__(self, model: nn.Module, *, keep: bool) -> None:
        self._model, self._keep = model, keep

    def state_dict(self) -> dict[str, Any]:
        """Return whole tensors in host memory; empty on ranks that keep none. Collective."""
        return full_state_dict(self._model, keep=self._keep)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take each parameter's shard from whole tensors, which every rank has; what is in shards already stays so."""
        own = self._model.state_dict()
        for name, value in state_dict.items():
            mine = own.get(name)
            if isinstance(mine, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                whole = value.to(mine.device, mine.dtype)
                state_dict = {**state_dict, name: distribute_tensor(whole, mine.device_mesh, mine.placements)}
        self._model.load_state_dict(state_dict)


def synced_generation(model: nn.Module, total: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """Have a model's `generate` repeat its last forward, once it is done, for as long as other ranks make forwards.

    It is put into its place on the model, and is a collective call then. Nothing is done to a model without one, and to
    one that goes on by itself, as those of transformers do with `synced_gpus`, or has such a model inside.

    Args:
        model: what generates, by calls of itself.
        total: sums a tensor over the ranks.
        device: where such tensors are.
    """
    generate = getattr(model, "generate", None)
    if not callable(generate) or any(_goes_on(module) for module in model.modules()):
        return
    one, none = torch.ones((), device=device), torch.zeros((), device=device)

    @functools.wraps(generate)
    def together(*inputs: Any, **options: Any) -> Any:
        last: list[tuple[Any, Any]] = []

        def before_forward(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
            last[:] = [(inputs, options)]
            total(one)

        # First of all hooks: others gather weights, which ranks that are done do once they know that one goes on.
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


def _goes_on(module: nn.Module) -> bool:
    generate = getattr(module, "generate", None)
    if not callable(generate):
        return False
    return getattr(generate, "goes_on", False) or "synced_gpus" in inspect.signature(generate).parameters
