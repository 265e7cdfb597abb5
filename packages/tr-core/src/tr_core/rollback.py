"""Compute something more than once from the same state, and leave the state as it was."""

from __future__ import annotations

import functools
import operator
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tr_core.model_io import local_shard
from tr_core.random_state import RandomState, read_state, write_state

_OWN = ("accelerate", "bitsandbytes", "deepspeed", "torch", "tr_core", "tr_dist", "tr_optim", "transformer_engine")
# Hooks of these are parts of the forward pass: they gather shards, cast inputs, add adapters.
_HOOK_OWNERS = frozenset((*_OWN, "peft", "torchao", "transformers"))
# Objects of these keep their own state in order: putting back a part of it would disturb it.
_STATE_OWNERS = frozenset((*_OWN, "builtins", "tr_args", "tr_ckpt", "tr_log"))
_PARTS_OF_MODULES = frozenset(vars(nn.Module()))
_FLAGS = ("training", "require_forward_param_sync")  # DDP's: whether the next forward sends the buffers

_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
_DEPTH, _MOST, _SHORT = 4, 10_000, 64
_LARGE_BYTES = 1 << 24


class Rollback:
    """Remember what a computation may change, and put it back in place.

    It remembers the global random generators, and of each root: buffers, modes and attributes of modules, and what
    attributes and closures hold (numbers, containers, tensors, generators, objects of the roots' own packages). It does
    not remember parameters, and not what other code holds.

    Args:
        device: whose generator is remembered too.
        roots: modules, functions and other objects.
    """

    def __init__(self, device: torch.device, *roots: Any) -> None:
        self._random = RandomState(device)
        self._states = self._random.state_dict()
        self._seen: dict[int, Any] = {}
        self._undo: list[Callable[[], object]] = []
        parts = [part for root in roots for part in (root.modules() if isinstance(root, nn.Module) else [root])]
        self._packages = {_root_name(part) for part in parts} - _STATE_OWNERS
        for root in roots:
            self._add(root, _DEPTH)

    def restore(self) -> None:
        """Put everything back. It may be called any number of times."""
        for undo in self._undo:
            undo()
        self._random.load_state_dict(self._states)

    def _add(self, thing: Any, depth: int) -> None:
        if depth < 0 or id(thing) in self._seen or len(self._seen) > _MOST:
            return
        if isinstance(thing, nn.Module):
            for module in thing.modules():
                self._add_module(module, depth)
        elif isinstance(thing, torch.Tensor):
            if not thing.requires_grad and _is_plain(thing) and thing.nbytes <= 4 * _LARGE_BYTES:
                self._add_tensor(thing)
        elif isinstance(thing, torch.Generator | np.random.Generator | np.random.RandomState):
            self._seen[id(thing)] = thing
            self._undo.append(functools.partial(write_state, thing, read_state(thing)))
        elif type(thing) in _CONTAINERS:
            self._add_container(thing, depth)
        else:
            self._add_object(thing, depth)

    def _add_object(self, thing: Any, depth: int) -> None:
        if isinstance(thing, types.MethodType):
            self._add(thing.__self__, depth)
        elif isinstance(thing, functools.partial):
            self._add_all((thing.func, *thing.args, *thing.keywords.values()), depth)
        elif isinstance(thing, types.FunctionType):
            self._add_closure(thing, depth)
        elif not isinstance(thing, type) and hasattr(thing, "__dict__") and _root_name(type(thing)) in self._packages:
            self._add_attributes(thing, depth)

    def _add_module(self, module: nn.Module, depth: int) -> None:
        if id(module) in self._seen:
            return
        own = vars(module)
        for name in _FLAGS:
            if name in own:
                self._undo.append(functools.partial(own.__setitem__, name, own[name]))
        if type(module._buffers) in _CONTAINERS:  # a script's are none
            self._undo.append(functools.partial(_refill, module._buffers, dict(module._buffers)))
        for buffer in module.buffers(recurse=False):
            if _is_plain(buffer):
                self._add_tensor(buffer)
        if {_root_name(kind) for kind in type(module).__mro__} <= _STATE_OWNERS:
            self._seen[id(module)] = module
        else:
            self._add_attributes(module, depth)

    def _add_attributes(self, thing: Any, depth: int) -> None:
        if isinstance(thing, types.ModuleType | torch.optim.Optimizer):
            return
        self._seen[id(thing)] = thing
        kept = _PARTS_OF_MODULES if isinstance(thing, nn.Module) else frozenset()
        held = {name: value for name, value in vars(thing).items() if name not in kept}
        self._undo.append(functools.partial(_reset_attributes, vars(thing), held, kept))
        self._add_all((value for name, value in held.items() if not name.endswith("_dataset")), depth)

    def _add_container(self, thing: Any, depth: int) -> None:
        self._seen[id(thing)] = thing
        copied = dict(thing) if isinstance(thing, dict) else list(thing)
        self._undo.append(functools.partial(_refill, thing, copied))
        if len(copied) <= _SHORT:
            self._add_all(copied.values() if isinstance(copied, dict) else copied, depth)

    def _add_closure(self, function: types.FunctionType, depth: int) -> None:
        self._seen[id(function)] = function
        cells = [cell for cell in function.__closure__ or () if cell != types.CellType()]
        for cell in cells:
            self._undo.append(functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
        self._add_all((cell.cell_contents for cell in cells), depth)

    def _add_all(self, values: Iterable[Any], depth: int) -> None:
        for value in values:
            self._add(value, depth - 1)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if id(tensor) in self._seen or tensor.device.type == "meta":
            return
        self._seen[id(tensor)] = tensor
        local = local_shard(tensor.detach())
        is_large = local.device.type != "cpu" and local.nbytes > _LARGE_BYTES
        self._undo.append(functools.partial(_write_back, tensor, local.cpu() if is_large else local.clone()))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not is_lazy(tensor)


@torch.no_grad()
def _write_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    local = local_shard(tensor.detach())
    # What did not change is not written: it may share its memory within itself, or be compared by its version.
    if local.dtype != value.dtype or not torch.equal(local, value.to(local.device)):
        local.copy_(value)


def _refill(container: Any, copied: Any) -> None:
    # What did not change is not touched: another thread may read it.
    if isinstance(container, dict):
        is_same = list(container) == list(copied) and all(container[name] is copied[name] for name in copied)
    else:
        is_same = len(container) == len(copied) and all(map(operator.is_, container, copied))
    if not is_same:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(copied)


def _reset_attributes(own: dict[str, Any], held: dict[str, Any], kept: frozenset[str]) -> None:
    for name in own.keys() - held.keys() - kept:
        del own[name]
    own.update(held)


@contextmanager
def without_own_hooks(model: nn.Module) -> Iterator[None]:
    """Leave out a user's forward hooks in the block; those of libraries are parts of the forward pass."""
    held = [hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    copies = [(hooks, OrderedDict(hooks)) for hooks in held if hooks]
    for hooks, copied in copies:
        for number, hook in copied.items():
            if _root_name(_function_of(hook)) not in _HOOK_OWNERS:
                del hooks[number]
    try:
        yield
    finally:
        for hooks, copied in copies:
            _refill(hooks, copied)


def _function_of(hook: Any) -> Any:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__func__", hook)


def _root_name(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]
