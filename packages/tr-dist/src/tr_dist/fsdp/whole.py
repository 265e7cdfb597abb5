"""Put a divided model's parameters together, and take whole ones apart again."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole_state(model: nn.Module, *, keep: bool) -> dict[str, Any]:
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


class WholeModel:
    """A divided model whose state, as a checkpoint has it, is whole.

    Args:
        model: divided.
        keep: whether this rank keeps what is gathered; one of them writes it.
    """

    def __init__(self, model: nn.Module, *, keep: bool) -> None:
        self._model, self._keep = model, keep

    def state_dict(self) -> dict[str, Any]:
        """Return whole tensors in host memory; empty on ranks that keep none. Collective."""
        return whole_state(self._model, keep=self._keep)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take each parameter's shard from whole tensors, which every rank has; what is in shards already stays so."""
        own = self._model.state_dict()
        for name, value in state_dict.items():
            mine = own.get(name)
            if isinstance(mine, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
                whole = value.to(mine.device, mine.dtype)
                state_dict = {**state_dict, name: distribute_tensor(whole, mine.device_mesh, mine.placements)}
        self._model.load_state_dict(state_dict)
