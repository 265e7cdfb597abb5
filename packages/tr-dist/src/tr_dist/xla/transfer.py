"""Move modules to an XLA device, and states back to the host."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to an XLA device; parameters and buffers that modules share stay shared.

    Moving replaces every tensor, because a host tensor cannot become an XLA tensor.
    """
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((held, name))
    model = model.to(device)
    for (first, first_name), *others in places.values():
        for held, name in others:
            held[name] = first[first_name]
    return model


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict with tensors in host memory; parameters that modules share are one tensor."""
    state = module.state_dict(keep_vars=True)  # the tensors themselves, to find shared ones
    moved = to_host(state)
    if hasattr(state, "_metadata"):
        moved._metadata = state._metadata  # pyright: ignore[reportAttributeAccessIssue]
    return moved


def to_host(tree: Any) -> Any:
    """Return dicts, lists and tuples with their tensors copied to the host, all at once."""
    found: dict[int, torch.Tensor] = {}
    _walk(tree, lambda tensor: found.setdefault(id(tensor), tensor))
    on_device = {key: tensor.detach() for key, tensor in found.items() if tensor.device.type == "xla"}
    # Copied one by one, each tensor on several devices would need a program to be compiled.
    fetched = importlib.import_module("torch_xla")._XLAC._xla_get_cpu_tensors(
        list(on_device.values())
    )  # sync: in saves
    copies = dict(zip(on_device, fetched, strict=True))
    return _walk(tree, lambda tensor: copies[id(tensor)] if id(tensor) in copies else tensor.detach().clone())


def _walk(tree: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, dict):
        kind = OrderedDict if isinstance(tree, OrderedDict) else dict
        return kind((key, _walk(value, function)) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(_walk(value, function) for value in tree)
    return tree
