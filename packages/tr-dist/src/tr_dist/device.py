"""Choose the device on which a rank computes."""

from __future__ import annotations

import os

import torch

from tr_dist.environment import LaunchEnvironment


def rank_device(environment: LaunchEnvironment, *, use_cpu: bool = False) -> torch.device:
    """Return the CUDA device whose index is LOCAL_RANK, or the CPU if it is asked for or no CUDA device is visible.

    Indices count the devices that CUDA_VISIBLE_DEVICES leaves visible, in its order.

    Raises:
        ValueError: there are CUDA devices, but fewer than processes on this machine.
    """
    if use_cpu or not torch.cuda.is_available():
        return torch.device("cpu")
    visible, local_rank = torch.cuda.device_count(), environment.local_rank
    if local_rank >= visible:
        choice = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = f"CUDA_VISIBLE_DEVICES={choice!r}" if choice is not None else "CUDA_VISIBLE_DEVICES is not set"
        raise ValueError(
            f"LOCAL_RANK={local_rank} has no CUDA device: {visible} visible here ({shown}), and each process "
            f"needs its own; start at most {visible} on this machine, make more devices visible, or set "
            "use_cpu=True"
        )
    return torch.device("cuda", local_rank)
