"""Refuse ranks that compute on different hardware, where replicas would drift apart."""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.distributed as dist


def refuse_unlike_ranks(device: torch.device, name: str, own: str) -> None:
    """Raise where ranks would get other singular vectors of the same matrix. All ranks call it.

    Args:
        device: where this rank computes.
        name: the optimizer, for the message.
        own: what to use instead.

    Raises:
        ValueError: they are not all alike; on every rank.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    kinds: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(kinds, _hardware(device))
    if len(set(kinds)) > 1:
        seen = ", ".join(f"rank {rank} {kind}" for rank, kind in enumerate(kinds))
        raise ValueError(
            f"{name} decomposes each gradient on every rank, and different hardware finds singular vectors of other "
            f"signs, by which replicas would drift apart: {seen}; use {own}, whose ranks share one basis"
        )


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return f"on {torch.cuda.get_device_name(device)} with torch {torch.__version__}"
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"on {processor} with {torch.get_num_threads()} threads and torch {torch.__version__}"
