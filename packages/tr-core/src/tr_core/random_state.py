"""Seed the random number generators, separate the randomness of data loading, and save and restore states."""

from __future__ import annotations

import copy
import functools
import os
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

_MASK_64 = (1 << 64) - 1

_seeding = {"by_place": False}


def set_seed(seed: int, deterministic: bool = False, device: torch.device | None = None) -> None:
    """Seed Python's, NumPy's and torch's generators, also those of every device.

    Args:
        seed: any non-negative integer.
        deterministic: also make torch use deterministic kernels (`enable_full_determinism`).
        device: the device of training. Torch seeds its own devices, but not those of another library (XLA).
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.manual_seed(seed)
    if device is not None and device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)
    if deterministic:
        _use_deterministic_kernels()


def enable_full_determinism(seed: int) -> None:
    """Seed everything and make torch use deterministic kernels only; some get slower, some raise.

    It sets CUBLAS_WORKSPACE_CONFIG and FLASH_ATTENTION_DETERMINISTIC for this process if they are unset.
    """
    set_seed(seed, deterministic=True)


def _use_deterministic_kernels() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def derive_seed(*numbers: int) -> int:
    """Derive a 62-bit seed from integers, so that neighbouring inputs give unrelated seeds (SplitMix64 rounds).

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", the mixing function.
    """
    state = 0x9E3779B97F4A7C15
    for number in numbers:
        state = (state + (number & _MASK_64) * 0x9E3779B97F4A7C15) & _MASK_64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
        state ^= state >> 31
    return state >> 2


def seed_host_generators(seed: int) -> None:
    """Seed the three host generators only: data loading must not touch a device."""
    _seeding["by_place"] = True
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def swap_rng(seed: int) -> tuple[Any, ...]:
    """Seed the host generators, and return what `restore_rng` needs to restore them.

    Cost: about 20 microseconds for both. NumPy's generator is swapped for another one, which is twenty times cheaper
    than a copy. The only loss is the spare number after an odd count of legacy `np.random.randn`.
    """
    numpy = sys.modules.get("numpy")
    outer = numpy.random.get_bit_generator() if numpy else None
    aside = (random.getstate(), torch.default_generator.get_state(), numpy, outer, _seeding["by_place"])
    _seeding["by_place"] = True
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if numpy:
        numpy.random.set_bit_generator(_inner_bit_generator())
        numpy.random.seed(seed % 2**32)
    return aside


def restore_rng(aside: tuple[Any, ...]) -> None:
    """Restore the host generators to their state before `swap_rng`."""
    python_state, torch_state, numpy, outer, _seeding["by_place"] = aside
    random.setstate(python_state)
    torch.default_generator.set_state(torch_state)
    if numpy:
        numpy.random.set_bit_generator(outer)


def is_seeded_by_position() -> bool:
    """Whether the host generators are seeded by position: loading a sample again draws the same numbers."""
    return _seeding["by_place"]


@contextmanager
def separate_randomness(seed: int) -> Iterator[None]:
    """Seed the host generators with `seed` inside a block, and restore them after it."""
    aside = swap_rng(seed)
    try:
        yield
    finally:
        restore_rng(aside)


@cache
def _inner_bit_generator() -> Any:
    return sys.modules["numpy"].random.MT19937(0)


class RandomState:
    """Save and restore the process's random generators: Python, NumPy, torch on the host and on `device`.

    The keys are those of `tr_ckpt.RNGState`, so that each class restores what the other saved.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states as tensors, plain numbers and strings."""
        version, words, gauss = random.getstate()
        state: dict[str, Any] = {
            "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
            "torch": torch.get_rng_state(),
        }
        if "numpy" in sys.modules:
            algorithm, keys, position, has_gauss, gauss = sys.modules["numpy"].random.get_state()
            state["numpy"] = {
                "algorithm": str(algorithm),
                "keys": torch.from_numpy(keys.astype("int64")),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            }
        if self.device.type != "cpu":
            state[self.device.type] = [torch.get_device_module(self.device).get_rng_state()]
        return state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the generators' states, and keep them for `reapply`."""
        self._restored = state_dict
        python = state_dict["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state_dict["torch"])
        if "numpy" in state_dict:
            import numpy as np

            saved = state_dict["numpy"]
            keys = saved["keys"].numpy().astype(np.uint32)
            np.random.set_state((saved["algorithm"], keys, saved["position"], saved["has_gauss"], saved["gauss"]))
        if self.device.type in state_dict:
            held = state_dict[self.device.type]  # of the device in use, or of all visible ones
            own = held[0 if len(held) == 1 else self.device.index or 0]
            torch.get_device_module(self.device).set_rng_state(own)

    def reapply(self) -> None:
        """Restore the states that were loaded last, if any, again: right before the first resumed step."""
        if self._restored is not None:
            self.load_state_dict(self._restored)
            self._restored = None


@cache
def generator_kinds() -> tuple[type, ...]:
    """Return the classes of generators; a function, because numpy imports its own on first use."""
    return (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


_DEPTH, _MOST = 5, 400
"""How far objects inside objects are followed, and how many at most."""

_SHORT = 16  # such lists hold transforms and samplers, not samples

# Attributes of an iterating loader: processes, queues, and what the search finds through the loader itself.
_PASSING = ("_iterator", "_reader")


def find_generators(root: Any, *, depth: int = _DEPTH) -> dict[str, Any]:
    """Return the generators inside an object by their paths, from its attributes and the attributes of these.

    It follows attributes, short lists and dicts, and what functions are bound to: a sampler's `generator`, that of a
    dataset's transform, one in a closure. It does not follow torch modules, and skips the global generators.
    """
    return {
        path: thing
        for path, thing in find_inside(root, generator_kinds(), depth=depth).items()
        if not _is_global(thing)
    }


def find_inside(root: Any, kinds: tuple[type, ...], *, depth: int = _DEPTH) -> dict[str, Any]:
    """Return the objects of these classes inside an object by their paths, searched as `find_generators` does."""
    found: dict[str, Any] = {}
    seen, queue = {id(root)}, deque([("", root, depth)])
    while queue and len(seen) <= _MOST:
        path, thing, left = queue.popleft()
        if isinstance(thing, (*kinds, *generator_kinds())):
            if isinstance(thing, kinds):
                found[path] = thing
            continue
        for name, value in parts_of(thing) if left else ():
            if id(value) not in seen and _may_hold(value):
                seen.add(id(value))
                queue.append((f"{path}.{name}" if path else name, value, left - 1))
    return found


def read_states(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of each generator, unconverted: tensors, arrays, plain numbers and strings."""
    return {path: read_state(generator) for path, generator in generators.items()}


def write_states(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Restore the generators that have a state in `states`."""
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
    """Restore one generator to a state that was read from one of its kind."""
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.setstate(state)


def _is_global(generator: Any) -> bool:
    return generator is torch.default_generator or generator is np.random.mtrand._rand


def parts_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds by name: attributes, entries, what a function or a method is bound to."""
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
    elif isinstance(thing, list | tuple | set | deque):
        yield from ((str(number), value) for number, value in enumerate(thing))
    elif isinstance(thing, dict):
        yield from ((str(name), value) for name, value in thing.items())
    elif not isinstance(thing, type | nn.Module | types.ModuleType):
        yield from ((name, value) for name, value in list(vars(thing).items()) if name not in _PASSING)


def _may_hold(value: Any) -> bool:
    if isinstance(value, list | tuple | dict):
        return len(value) <= _SHORT
    return isinstance(value, generator_kinds()) or hasattr(value, "__dict__") or isinstance(value, types.MethodType)
