"""Read what a captured step has built in of Python: numbers and switches of a model, an optimizer and a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

Tensors = list[torch.Tensor]

_OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}
_PLAIN = (bool, int, float, str, type(None))
_NOT_BUILT_IN = ("params", "lr", "initial_lr", "param_names")


class NotCapturableError(Exception):
    """Say why a step cannot be captured."""


class Batch:
    """The tensors of a micro-batch, and what else it holds.

    Args:
        inputs: a mapping, a list, a tuple or a tensor; it may be nested.

    Attributes:
        shapes: everything else, to compare with that of other batches.

    Raises:
        NotCapturableError: it holds something that is neither a tensor nor a number, a switch or a text.
    """

    def __init__(self, inputs: Any) -> None:
        given = dict(inputs) if isinstance(inputs, Mapping) else inputs
        if type(given) is dict and all(type(value) is torch.Tensor for value in given.values()):
            self._leaves, self._spec, structure = list(given.values()), None, tuple(given)
            self._names = structure
            self.tensors: Tensors = self._leaves
        else:
            self._leaves, self._spec = pytree.tree_flatten(given)
            self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
            others = [leaf for leaf in self._leaves if not isinstance(leaf, torch.Tensor)]
            if strange := [type(leaf).__name__ for leaf in others if type(leaf) not in _PLAIN]:
                raise NotCapturableError(f"the batch holds a {strange[0]}, whose content a capture cannot compare")
            structure = (repr(self._spec), *others)
        self.shapes = structure, tuple((tensor.shape, tensor.dtype, tensor.stride()) for tensor in self.tensors)

    def rebuild(self, tensors: Tensors) -> Any:
        """Return the same batch with other tensors."""
        if self._spec is None:
            return dict(zip(self._names, tensors, strict=True))
        left = iter(tensors)
        leaves = [next(left) if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]
        return pytree.tree_unflatten(leaves, self._spec)


def describe_shapes(shapes: tuple[Any, ...]) -> str:
    """Return `Batch.shapes` in words."""
    return ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype, _ in shapes[1])


@dataclass(slots=True)
class _Attributes:
    """The attributes of one module or configuration that are compared."""

    own: dict[str, Any]
    where: str
    names: list[str]
    size: int = -1

    def read(self) -> list[Any]:
        if len(self.own) != self.size:
            self.names, self.size = [name for name in self.own if name not in _OF_MODULES], len(self.own)
        own = self.own
        return [value if type(value := own.get(name)) in _PLAIN else _comparable(value) for name in self.names]


class BuiltInValues:
    """Read what a capture has built in of a model and an optimizer: numbers, texts, switches, and what there is."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        places = [(vars(module), f"{name}." if name else "") for name, module in model.named_modules()]
        self._modules = [_Attributes(own, where, []) for own, where in places]
        configurations = {
            id(own["config"]): (own["config"], where) for own, where in reversed(places) if "config" in own
        }
        self._configurations = [
            _Attributes(vars(config), f"{where}config.", [])
            for config, where in configurations.values()
            if hasattr(config, "__dict__")
        ]
        self.parameters = dict(model.named_parameters())
        self.buffers = dict(model.named_buffers())
        self._buffer_places = [(m._buffers, key) for m in model.modules() for key in m._buffers]
        self.modules = [id(module.own) for module in self._modules]

    def read(self) -> tuple[Any, ...]:
        """Return the current values, to compare with earlier ones."""
        found: list[Any] = []
        for module in self._modules:
            own = module.own
            found.append((len(own), len(own["_buffers"]), *map(id, own["_modules"].values())))
            found.append(tuple(map(id, own["_parameters"].values())))
            found += module.read()
        for configuration in self._configurations:
            found += configuration.read()
        for group in self._optimizer.param_groups:
            found.append(len(group["params"]))
            found += [_comparable(value) for name, value in group.items() if name not in _NOT_BUILT_IN]
        found += [parameter.requires_grad for parameter in self.parameters.values()]
        return tuple(found)

    def names(self) -> list[str]:
        """Return the names of what `read` returns."""
        found: list[str] = []
        for module in self._modules:
            name = module.where[:-1] or "the model"
            found += [f"what {name} holds", f"the parameters of {name}", *(module.where + n for n in module.names)]
        for configuration in self._configurations:
            found += [configuration.where + name for name in configuration.names]
        for number, group in enumerate(self._optimizer.param_groups):
            options = [name for name in group if name not in _NOT_BUILT_IN]
            found += [f"{name} of parameter group {number}" for name in ("the number of parameters", *options)]
        return found + [f"requires_grad of {name}" for name in self.parameters]

    def objects(self) -> list[Any]:
        """Return what `read` compares by identity."""
        return [dict(attributes.own) for attributes in (*self._modules, *self._configurations)]

    def current_buffers(self) -> Tensors | None:
        """Return the buffers as they are now, in the order of `buffers`; None if there are others."""
        buffers: dict[int, torch.Tensor] = {}
        for own, key in self._buffer_places:
            if (buffer := own.get(key)) is not None:
                buffers.setdefault(id(buffer), buffer)
        return list(buffers.values()) if len(buffers) == len(self.buffers) else None

    def hook(self) -> str | None:
        """Return which hook of a module or parameter would not be called; None if there is none."""
        for module in self._modules:
            own = module.own
            if (
                own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or own["_backward_hooks"]
                or own["_backward_pre_hooks"]
            ):
                return f"{module.where[:-1] or 'the model'} has hooks, whose Python code must run in every step"
        for name, parameter in self.parameters.items():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                return f"the parameter {name} has hooks, whose Python code must run in every step"
        return None


def _comparable(value: Any) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list | tuple) and all(type(v) in _PLAIN for v in value):
        return tuple(value)
    return id(value)
