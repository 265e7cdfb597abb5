"""Choose the device on which a rank computes."""

from __future__ import annotations

import logging
import os
from functools import cache

import torch

from tr_dist.environment import LaunchEnvironment

_logger = logging.getLogger(__name__)


def rank_device(environment: LaunchEnvironment, *, use_cpu: bool = False) -> torch.device:
    """Return the CUDA device whose index is LOCAL_RANK, or the CPU on request or if no CUDA device is visible.

    Indices count the devices that CUDA_VISIBLE_DEVICES leaves visible, in its order. A process without a launcher uses
    the first, and logs once that the others stay idle.

    Raises:
        ValueError: there are CUDA devices, but fewer than processes on this machine; or there is an Apple device, over
            which ranks cannot communicate.
    """
    if use_cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if torch.backends.mps.is_available():
            raise ValueError(
                f"rank {environment.rank} of {environment.world_size} cannot compute on this machine's mps device: "
                "neither gloo nor nccl carries its tensors, and there is one for all processes; train in one process "
                "with strategy='mps', or in several with use_cpu=True"
            )
        return torch.device("cpu")
    visible, local_rank = torch.cuda.device_count(), environment.local_rank
    if local_rank >= visible:
        raise ValueError(
            f"LOCAL_RANK={local_rank} has no CUDA device: {visible} visible here ({_choice()}), and each process "
            f"needs its own; start at most {visible} on this machine, make more devices visible, or set "
            "use_cpu=True (trainer doctor shows which GPU is which device)"
        )
    if environment.launcher == "none" and environment.world_size == 1 < visible:
        _log_idle_devices(visible)
    return torch.device("cuda", local_rank)


def lone_device(*, use_cpu: bool = False) -> torch.device:
    """Return the device of a process that trains alone: the first CUDA device, the Apple device, or the CPU."""
    if not use_cpu and not torch.cuda.is_available() and torch.backends.mps.is_available():
        return torch.device("mps")
    return rank_device(LaunchEnvironment(), use_cpu=use_cpu)


@cache  # once a process
def _log_idle_devices(visible: int) -> None:
    _logger.warning(
        "%d CUDA devices are visible (%s), and this process uses one, cuda:0; to use all, start a process for each: "
        "trainer launch --nproc %d SCRIPT, or torchrun --nproc-per-node %d SCRIPT",
        visible, _choice(), visible, visible,
    )  # fmt: skip


def _choice() -> str:
    choice = os.environ.get("CUDA_VISIBLE_DEVICES")
    return f"CUDA_VISIBLE_DEVICES={choice!r}" if choice is not None else "CUDA_VISIBLE_DEVICES is not set"
