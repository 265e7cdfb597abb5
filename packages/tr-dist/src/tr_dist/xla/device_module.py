"""Give torch what it asks a kind of device for, `torch.xla`, which torch_xla does not register."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_BYTES = 8  # of a random state


def register(xla_model: Any) -> None:
    """Register `torch.xla`, by which torch seeds, checkpoints activations and sets random states; once a process.

    Random states are what other devices' are: tensors of bytes on the host.

    Args:
        xla_model: the module `torch_xla.core.xla_model`.
    """
    if not hasattr(torch, "xla"):
        torch._register_device_module("xla", _make(xla_model))


def _make(xla_model: Any) -> ModuleType:
    module: Any = ModuleType("torch.xla", "Random states and devices of XLA, as `torch.cuda` has them.")

    def get_rng_state(device: Any = None) -> torch.Tensor:
        state = xla_model.get_rng_state()
        return torch.frombuffer(bytearray(state.to_bytes(_BYTES, "little")), dtype=torch.uint8).clone()

    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        xla_model.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"))

    def manual_seed(seed: int) -> None:
        xla_model.set_rng_state(seed)

    @contextmanager
    def device(index: Any) -> Iterator[None]:
        yield  # a process computes on one

    given = {function.__name__: function for function in (get_rng_state, set_rng_state, manual_seed, device)}
    vars(module).update(
        given,
        _initialized=True,  # what activation checkpointing asks before it keeps random states
        manual_seed_all=manual_seed,
        get_rng_state_all=lambda: [get_rng_state()],
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda index: None,
        synchronize=lambda device=None: xla_model.wait_device_ops(),
        empty_cache=lambda: None,  # the compiler plans memory: nothing is cached
    )
    return module
