"""Bring a model's values to every rank: those of rank 0, before or after it is divided."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict


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
