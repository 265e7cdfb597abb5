"""Read scalars that are on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def accumulator_dtype(device: torch.device) -> torch.dtype:
    """Return what sums are kept in: 64 bits where the device has them."""
    return torch.float32 if device.type == "mps" else torch.float64


def read_scalars(scalars: Sequence[torch.Tensor]) -> list[float]:
    """Read scalar tensors of one device in one transfer, however many they are.

    32-bit values come out as they are; whole numbers up to 2**53 too (2**24 on MPS, which has no 64-bit floats).
    """
    if not scalars:
        return []
    dtype = accumulator_dtype(scalars[0].device)
    return torch.stack([scalar.detach().reshape(()).to(dtype) for scalar in scalars]).tolist()  # sync: once a call
