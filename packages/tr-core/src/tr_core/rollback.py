"""Compute something more than once from the same state, and leave the state as it was."""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tr_core.model_io import local_shard
from tr_core.random_state import RandomState, generator_kinds, parts_of, read_state, write_state

_OWN = ("accelerate", "bitsandbytes", "deepspeed", "torch", "tr_core", "tr_dist", "tr_optim", "transformer_engine")
# Hooks of these are parts of the forward pass: they gather shards, cast inputs, add adapters.
_HOOK_OWNERS = frozenset((*_OWN, "peft", "torchao", "transformers"))
# Objects of these keep their own state in order: putting back a part of it would disturb it.
_STATE_OWNERS = frozenset((*_OWN, "builtins", "tr_args", "tr_ckpt", "tr_log"))
_PARTS_OF_MODULES = frozenset(vars(nn.Module()))
_FLAGS = ("training", "require_forward_param_sync")  # DDP's: whether the next forward sends the buffers
_CONTAINERS = (list, dict, set, deque, defaultdict, OrderedDict, Counter)
_PASSED_THROUGH = (types.MethodType, functools.partial)
_LEFT_ALONE = (type, types.ModuleType, torch.optim.Optimizer, torch.utils.data.Dataset)
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
        if depth < 0 or id(thing) in self._seen or len(self._seen) > _MOST or isinstance(thing, _LEFT_ALONE):
            return
        if isinstance(thing, nn.Module):
            for module in thing.modules():
                self._add_module(module, depth)
        elif isinstance(thing, torch.Tensor):
            if not thing.requires_grad and _is_plain(thing) and thing.nbytes <= 4 * _LARGE_BYTES:
                self._add_tensor(thing)
        elif isinstance(thing, generator_kinds()):
            self._remember(thing, functools.partial(write_state, thing, read_state(thing)))
        elif self._add_holder(thing):
            for _, value in parts_of(thing):
                self._add(value, depth - 1)

    def _add_holder(self, thing: Any) -> bool:
        """Remember what an object holds; return whether the parts are to be remembered too."""
        if type(thing) in _CONTAINERS:
            self._remember(thing, functools.partial(_refill, thing, copy.copy(thing)))
            return len(thing) <= _SHORT
        if isinstance(thing, types.FunctionType):
            for cell in thing.__closure__ or ():
                if cell != types.CellType():
                    self._remember(thing, functools.partial(setattr, cell, "cell_contents", cell.cell_contents))
            return True
        if not hasattr(thing, "__dict__") or _root_name(type(thing)) not in self._packages:
            return isinstance(thing, _PASSED_THROUGH)
        self._remember(thing, functools.partial(_refill, vars(thing), dict(vars(thing))))
        return True

    def _add_module(self, module: nn.Module, depth: int) -> None:
        if id(module) in self._seen:
            return
        own = vars(module)
        self._remember(module, functools.partial(own.update, {name: own[name] for name in _FLAGS if name in own}))
        for buffer in filter(_is_plain, module.buffers(recurse=False)):
            self._add_tensor(buffer)
        self._add(module._buffers, depth)
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            self._undo.append(functools.partial(_remove_added, hooks, set(hooks)))
        if not {_root_name(kind) for kind in type(module).__mro__} <= _STATE_OWNERS:
            self._undo.append(functools.partial(_refill, own, dict(own)))
            for name in own.keys() - _PARTS_OF_MODULES:
                self._add(own[name], depth - 1)

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._seen:
            local = local_shard(tensor.detach())
            is_large = local.device.type != "cpu" and local.nbytes > _LARGE_BYTES
            copied = local.cpu() if is_large else local.clone()
            self._remember(tensor, functools.partial(_write_back, tensor, copied))

    def _remember(self, thing: Any, undo: Callable[[], object]) -> None:
        self._seen[id(thing)] = thing
        self._undo.append(undo)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device.type != "meta" and not is_lazy(tensor)


@torch.no_grad()
def _write_back(tensor: torch.Tensor, value: torch.Tensor) -> None:
    local = local_shard(tensor.detach())
    # What did not change is not written: it may share its memory within itself, or be compared by its version.
    if local.dtype != value.dtype or not torch.equal(local, value.to(local.device)):
        local.copy_(value)


def _refill(container: Any, copied: Any) -> None:
    # What did not change is not touched: another thread may read it.
    now, then = ([*each, *(each.values() if isinstance(each, dict) else ())] for each in (container, copied))
    if len(now) == len(then) and all(map(operator.is_, now, then)):
        return
    if isinstance(container, dict):
        for name in container.keys() - copied.keys():
            del container[name]
        dict.update(container, copied)  # a Counter's own adds
    else:
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(copied)


def _remove_added(hooks: dict[int, Any], before: set[int]) -> None:
    """Remove hooks that a forward added: models of transformers do in their first, and note that they have them."""
    for number in hooks.keys() - before:
        if _owner(hooks[number]) not in _STATE_OWNERS:
            del hooks[number]


@contextmanager
def without_own_hooks(model: nn.Module) -> Iterator[None]:
    """Leave out a user's forward hooks in the block; those of libraries are parts of the forward pass."""
    held = [hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    copies = [(hooks, OrderedDict(hooks)) for hooks in held if hooks]
    try:
        for hooks, copied in copies:
            for number in [number for number, hook in copied.items() if not _is_of_library(hook)]:
                del hooks[number]
        yield
    finally:
        for hooks, copied in copies:
            hooks.clear()
            hooks.update(copied)


def _is_of_library(hook: Any) -> bool:
    return _owner(hook) in _HOOK_OWNERS


def _owner(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return _root_name(getattr(hook, "__func__", hook))


def _root_name(thing: Any) -> str:
    return str(getattr(thing, "__module__", "")).partition(".")[0]
