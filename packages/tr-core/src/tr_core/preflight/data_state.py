"""Put back what reading a few samples changes in data sets and collators: positions, attributes, own generators."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

Undo = Callable[[], object]

_DEPTH, _MOST = 2, 200
"""How far objects inside objects are followed in search of random number generators, and how many at most."""


def keep_data(objects: Iterable[Any]) -> list[Undo]:
    """Return functions that put data sets and collators back into the state of now.

    Put back are what their `load_state_dict` takes, their attributes, and the states of the generators that they, or
    objects in their attributes, hold.
    """
    given = [thing for thing in objects if thing is not None]
    undo = [_attributes(thing) for thing in given if _has_attributes(thing)]
    undo += [_position(thing) for thing in given if _has_state(thing)]
    seen: dict[int, Any] = {}
    for thing in given:
        _walk(thing, _DEPTH, seen)
    return undo + [restore for thing in seen.values() for restore in _generator(thing)]


def _has_attributes(thing: Any) -> bool:
    return hasattr(thing, "__dict__") and not isinstance(thing, type | nn.Module)


def _has_state(thing: Any) -> bool:
    methods = ("state_dict", "load_state_dict")
    return not isinstance(thing, type) and all(callable(getattr(thing, name, None)) for name in methods)


def _attributes(thing: Any) -> Undo:
    kept = dict(vars(thing))

    def put_back() -> None:
        vars(thing).clear()
        vars(thing).update(kept)

    return put_back


def _position(thing: Any) -> Undo:
    state = copy.deepcopy(thing.state_dict())
    return lambda: thing.load_state_dict(state)


def _walk(thing: Any, depth: int, seen: dict[int, Any]) -> None:
    if id(thing) in seen or len(seen) >= _MOST:
        return
    seen[id(thing)] = thing
    if depth and _has_attributes(thing):
        for value in list(vars(thing).values()):
            for inner in value if isinstance(value, tuple) or _is_short_list(value) else (value,):
                if _is_generator(inner) or _has_attributes(inner):
                    _walk(inner, depth - 1, seen)


def _is_short_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 16  # transforms, not samples


def _is_generator(thing: Any) -> bool:
    return isinstance(thing, torch.Generator | np.random.Generator | np.random.RandomState | random.Random)


def _generator(thing: Any) -> Iterator[Undo]:
    if isinstance(thing, torch.Generator | np.random.RandomState):
        state: Any = thing.get_state()
        yield lambda: thing.set_state(state)
    elif isinstance(thing, np.random.Generator):
        state = thing.bit_generator.state
        yield lambda: setattr(thing.bit_generator, "state", state)
    elif isinstance(thing, random.Random):
        state = thing.getstate()
        yield lambda: thing.setstate(state)
