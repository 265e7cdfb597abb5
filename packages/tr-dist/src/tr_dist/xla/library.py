"""Load torch_xla on demand, and check that the processes can train together.

torch expects a module `torch.xla` that torch_xla does not register. It is registered here.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch

from tr_dist.environment import started_processes

_BYTES = 8  # of a random state


def register(xla_model: Any) -> None:
    """Register `torch.xla`, through which torch seeds, checkpoints activations and sets random states; once a process.

    Random states have the form of other devices': tensors of bytes on the host.

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
        yield  # a process computes on one device

    given = {function.__name__: function for function in (get_rng_state, set_rng_state, manual_seed, device)}
    vars(module).update(
        given,
        _initialized=True,  # activation checkpointing checks this before it saves random states
        manual_seed_all=manual_seed,
        get_rng_state_all=lambda: [get_rng_state()],
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda index: None,
        synchronize=lambda device=None: xla_model.wait_device_ops(),
        empty_cache=lambda: None,  # the compiler plans memory, so there is no cache
    )
    return module


_OFF = ("0", "false", "f", "no", "n", "off")


class Library(NamedTuple):
    """The modules of torch_xla that a strategy uses.

    Attributes:
        torch_xla: the package: `device`, `sync`.
        model: `torch_xla.core.xla_model`: collectives and random states.
        runtime: `torch_xla.runtime`: which process this is, and what devices there are.
    """

    torch_xla: Any
    model: Any
    runtime: Any


def load_torch_xla(*, use_cpu: bool = False) -> Library:
    """Return torch_xla, started on the device that PJRT_DEVICE names, or on the one it finds.

    Args:
        use_cpu: compute on PJRT's CPU; sets PJRT_DEVICE if it is unset.

    Raises:
        ValueError: it is not installed, was switched off, or the environment selects another device or processes
            that would not train together.
    """
    check_environment(os.environ, use_cpu=use_cpu)
    if use_cpu:
        os.environ.setdefault("PJRT_DEVICE", "CPU")
    try:
        names = ("torch_xla", "torch_xla.core.xla_model", "torch_xla.runtime")
        library = Library(*map(importlib.import_module, names))
    except ImportError as error:
        raise ValueError(
            f"strategy='xla' needs torch_xla, which cannot be imported ({error}): pip install 'tr-dist[xla]' in an "
            "environment whose torch has the same version number, or choose another strategy"
        ) from error
    register(library.model)
    return library


def check_environment(environ: Mapping[str, str], *, use_cpu: bool = False) -> None:
    """Check the environment before torch_xla is loaded; afterwards it cannot be changed.

    Raises:
        ValueError: the message names the variable, and what to do.
    """
    off, named = environ.get("USE_TORCH_XLA", ""), environ.get("PJRT_DEVICE", "")
    if off.lower() in _OFF:
        raise ValueError(f"strategy='xla' and USE_TORCH_XLA={off!r} contradict each other; unset the variable")
    if use_cpu and named not in ("", "CPU"):
        raise ValueError(f"use_cpu=True and PJRT_DEVICE={named!r} contradict each other; give one of them")
    if world_size := started_processes(environ):
        raise ValueError(
            f"strategy='xla' in one of {world_size} processes (WORLD_SIZE), which torch_xla would not know of each "
            "other: start one process a machine; to use several devices in it set fsdp_config={'xla': True, "
            "'xla_fsdp_v2': True}, or call torch_xla.launch(function) in the script. To train in these processes "
            "without XLA, set strategy='ddp' or USE_TORCH_XLA=0"
        )


def check_replicas(library: Library) -> None:
    """Check that the replicas of this job can exchange values.

    Raises:
        ValueError: there are several on the CPU.
    """
    replicas = library.runtime.world_size()
    if replicas > 1 and library.runtime.device_type() == "CPU":
        raise ValueError(
            f"{replicas} replicas on PJRT's CPU (CPU_NUM_DEVICES={os.environ.get('CPU_NUM_DEVICES', 'unset')}) cannot "
            "exchange gradients: collectives between them never end; unset CPU_NUM_DEVICES to train in one, or divide "
            "one process's model and batches over the devices with fsdp_config={'xla': True, 'xla_fsdp_v2': True}"
        )
