"""Bring modules and states to an XLA device and back to the host."""

from __future__ import annotations

import importlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to an XLA device, with parameters and buffers that modules share still shared.

    Moving replaces them, each where it is found, for a tensor of the host cannot become one of XLA.
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


class HostState:
    """The state of a module or optimizer, with its tensors in host memory: what is saved does not depend on XLA.

    Tensors that are one stay one.

    Args:
        part: whose state it is.
    """

    def __init__(self, part: Any) -> None:
        self._part = part

    def state_dict(self) -> dict[str, Any]:
        """Return the state, copied from the device, which it waits for."""
        if isinstance(self._part, nn.Module):
            return module_state(self._part)
        return to_host(self._part.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any], **options: Any) -> Any:
        """Take over a state; modules and optimizers move it to their device."""
        return self._part.load_state_dict(state_dict, **options)

    def __getattr__(self, name: str) -> Any:
        """Return what else the module or optimizer has."""
        return getattr(self._part, name)


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict with tensors in host memory; parameters that modules share are one tensor."""
    state = module.state_dict(keep_vars=True)  # the tensors themselves, which tell what is shared
    moved = to_host(state)
    if hasattr(state, "_metadata"):
        moved._metadata = state._metadata  # pyright: ignore[reportAttributeAccessIssue]
    return moved


def to_host(tree: Any) -> Any:
    """Return dicts, lists and tuples with their tensors copied to the host, all at once."""
    found: dict[int, torch.Tensor] = {}
    _walk(tree, lambda tensor: found.setdefault(id(tensor), tensor))
    on_device = {key: tensor.detach() for key, tensor in found.items() if tensor.device.type == "xla"}
    # One by one, each of those that lie on several devices would be a program to be compiled.
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
