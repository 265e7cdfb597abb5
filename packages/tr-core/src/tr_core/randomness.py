"""Seed the random number generators, set them aside while data is loaded, and save their state."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

_MASK_64 = (1 << 64) - 1

_seeding = {"by_place": False}


def set_seed(seed: int, deterministic: bool = False, device: torch.device | None = None) -> None:
    """Seed Python's, NumPy's and torch's generators, those of every device included.

    Args:
        seed: any non-negative integer.
        deterministic: also ask torch for deterministic kernels (`enable_full_determinism`).
        device: where training is to be; torch seeds those that it has itself, but not one that a library brings (XLA).
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

    Sets CUBLAS_WORKSPACE_CONFIG and FLASH_ATTENTION_DETERMINISTIC for this process where they are unset.
    """
    set_seed(seed, deterministic=True)


def _use_deterministic_kernels() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def mix(*numbers: int) -> int:
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
    """Seed the three host generators only: loading data must not touch a device."""
    _seeding["by_place"] = True
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def set_aside(seed: int) -> tuple[Any, ...]:
    """Seed the host generators and return what `put_back` needs to make them as they were.

    Cost: about 20 microseconds for both. NumPy's generator is exchanged for another one instead of copied, which is
    twenty times cheaper; the one loss is the spare number that an odd count of legacy `np.random.randn` leaves behind.
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


def put_back(aside: tuple[Any, ...]) -> None:
    """Put the host generators back into the state that `set_aside` found."""
    python_state, torch_state, numpy, outer, _seeding["by_place"] = aside
    random.setstate(python_state)
    torch.default_generator.set_state(torch_state)
    if numpy:
        numpy.random.set_bit_generator(outer)


def is_seeded_by_place() -> bool:
    """Whether the host generators are seeded for what is being loaded: the same numbers whenever it is loaded again."""
    return _seeding["by_place"]


@contextmanager
def separate_randomness(seed: int) -> Iterator[None]:
    """Run a block with the host generators seeded by `seed`, and put them back afterwards as they were."""
    aside = set_aside(seed)
    try:
        yield
    finally:
        put_back(aside)


@cache
def _inner_bit_generator() -> Any:
    return sys.modules["numpy"].random.MT19937(0)


class RandomState:
    """The process's random number generators as one `Stateful`: Python, NumPy, torch on the host and on `device`."""

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
            name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
            state["numpy"] = {
                "name": name,
                "keys": torch.from_numpy(keys.astype("int64")),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            }
        if self.device.type != "cpu":
            state[self.device.type] = torch.get_device_module(self.device).get_rng_state()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Put the generators into a saved state; it is kept for `reapply`."""
        self._restored = state_dict
        python = state_dict["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state_dict["torch"])
        if "numpy" in state_dict:
            import numpy as np

            saved = state_dict["numpy"]
            keys = saved["keys"].numpy().astype(np.uint32)
            np.random.set_state((saved["name"], keys, saved["position"], saved["has_gauss"], saved["cached"]))
        if self.device.type in state_dict:
            held = state_dict[self.device.type]
            if isinstance(held, list):  # of another program: of the one device it used, or of all that it saw
                held = held[0 if len(held) == 1 else self.device.index or 0]
            torch.get_device_module(self.device).set_rng_state(held)

    def reapply(self) -> None:
        """Put the generators once more into the state loaded last, if any: right before the first resumed step."""
        if self._restored is not None:
            self.load_state_dict(self._restored)
            self._restored = None
