"""Load DeepSpeed for one device, and let go of the process group it has taken."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Collection
from typing import Any

import torch

from tr_dist.environment import LaunchEnvironment, read_environment

_LOCAL_RANK = "LOCAL_RANK"
_said: set[str] = set()  # what is in the environment because of `say_local_rank`
_GROUPS = ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "mesh_device")


def load_deepspeed(device: torch.device) -> Any:
    """Return the module `deepspeed`, for the accelerator that `device` is.

    On the CPU it is kept from compiling its exchange through shared memory, which takes minutes and, interrupted once,
    has every later run wait for a lock.

    Raises:
        ValueError: it is not installed, or was loaded for another accelerator.
    """
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        deepspeed = importlib.import_module("deepspeed")
    except ImportError as error:
        raise ValueError(
            f"strategy='deepspeed' needs DeepSpeed, which cannot be imported ({error}): pip install "
            "'tr-dist[deepspeed]'"
        ) from error
    found = importlib.import_module("deepspeed.accelerator").get_accelerator().device_name()
    if found != device.type:
        raise ValueError(
            f"DeepSpeed computes on {found!r} and this rank on {device}; set DS_ACCELERATOR={device.type} in the "
            "environment before deepspeed is imported"
        )
    # What newer versions of torch say of DeepSpeed's own calls, to nobody who could change them.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+_tensor` is deprecated", FutureWarning)
    if device.type == "cpu":
        operations = importlib.import_module("deepspeed.ops")
        operations.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def check_async_io(sections: Collection[str]) -> None:
    """Refuse offload to NVMe where DeepSpeed's operator for it cannot be built.

    Args:
        sections: of `zero_optimization`, that ask for such offload.

    Raises:
        ValueError: it cannot be built.
    """
    if sections and not importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder().is_compatible():
        named = " and ".join(f"zero_optimization.{name}.device='nvme'" for name in sections)
        raise ValueError(
            f"{named} needs DeepSpeed's operator async_io, which cannot be built here: it takes a C++ compiler, and "
            "libaio with its headers (apt-get install libaio-dev, dnf install libaio-devel; where they are elsewhere, "
            "CFLAGS=-I... and LDFLAGS=-L... say so); or use device='cpu'"
        )


def read_launch_environment() -> LaunchEnvironment:
    """Return what the launcher's variables say, without what `say_local_rank` has added.

    Raises:
        ValueError: they contradict each other, or are incomplete.
    """
    return read_environment({name: value for name, value in os.environ.items() if name not in _said})


def say_local_rank(local_rank: int) -> None:
    """Put into the environment, where no launcher did, what DeepSpeed reads there alone; until the group is left."""
    if _LOCAL_RANK not in os.environ:
        os.environ[_LOCAL_RANK] = str(local_rank)
        _said.add(_LOCAL_RANK)


def forget_process_group() -> None:
    """Have DeepSpeed take the process group anew next time: the one it knows was left."""
    for name in _said:
        os.environ.pop(name, None)
    _said.clear()
    vars(importlib.import_module("deepspeed.comm.comm"))["cdb"] = None
    groups = vars(importlib.import_module("deepspeed.utils.groups"))
    for name in _GROUPS:
        if name in groups:
            groups[name] = None
