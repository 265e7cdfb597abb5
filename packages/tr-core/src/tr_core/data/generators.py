"""Find the random number generators that data holds, and read and set their states."""

from __future__ import annotations

import copy
import functools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)

_DEPTH, _MOST = 5, 400
"""How far objects inside objects are followed, and how many at most."""

_SHORT = 16  # transforms and samplers are in such lists, not samples

# What a loader holds while it iterates: processes, queues, and what was found through the loader itself already.
_PASSING = ("_iterator", "_reader")


def find_generators(root: Any, *, depth: int = _DEPTH) -> dict[str, Any]:
    """Return the generators that an object holds, in its attributes and those of what it holds, by the way to them.

    Followed are attributes, short lists and dicts, and what functions are bound to: a sampler's `generator`, the one of
    a data set's transform, one in a closure. Modules of torch are not, and neither are the global generators.
    """
    found: dict[str, Any] = {}
    seen, queue = {id(root)}, deque([("", root, depth)])
    while queue and len(seen) <= _MOST:
        path, thing, left = queue.popleft()
        if isinstance(thing, _KINDS):
            if not _is_global(thing):
                found[path] = thing
            continue
        for name, value in _inside(thing) if left else ():
            if id(value) not in seen and _may_hold(value):
                seen.add(id(value))
                queue.append((f"{path}.{name}" if path else name, value, left - 1))
    return found


def read_states(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of each, which stays what it is: tensors, arrays, plain numbers and strings."""
    return {path: read_state(generator) for path, generator in generators.items()}


def write_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Put the generators into the states that are known for them."""
    for path, generator in generators.items():
        if path in states:
            write_state(generator, states[path])


def read_state(generator: Any) -> Any:
    """Return the state of one generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().clone()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return copy.deepcopy(generator.get_state(legacy=False))
    return generator.getstate()


def write_state(generator: Any, state: Any) -> None:
    """Put one generator into a state that was read of one of its kind."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def _is_global(generator: Any) -> bool:
    return generator is torch.default_generator or generator is np.random.mtrand._rand


def _inside(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, types.MethodType):
        yield "__self__", thing.__self__
    elif isinstance(thing, types.FunctionType):
        for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
            if cell != types.CellType():
                yield name, cell.cell_contents
    elif isinstance(thing, functools.partial):
        yield "func", thing.func
        yield from thing.keywords.items()
        yield from ((str(number), value) for number, value in enumerate(thing.args))
    elif isinstance(thing, list | tuple):
        yield from ((str(number), value) for number, value in enumerate(thing))
    elif isinstance(thing, dict):
        yield from ((str(name), value) for name, value in thing.items())
    elif not isinstance(thing, type | nn.Module | types.ModuleType):
        yield from ((name, value) for name, value in list(vars(thing).items()) if name not in _PASSING)


def _may_hold(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return len(value) <= _SHORT
    return isinstance(value, _KINDS) or hasattr(value, "__dict__") or isinstance(value, types.MethodType)
