"""Know when memory ran out, and let go of what the failed attempt held."""

from __future__ import annotations

import gc
import traceback

import torch

# Allocators and libraries that raise a plain RuntimeError say one of these.
_SIGNS = (
    "out of memory",
    "can't allocate memory",  # torch's allocator on the host
    "not enough memory: you tried to allocate",  # the same on Windows
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's way of saying that its work space did not fit
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that a device, or the host, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def release(error: BaseException, device: torch.device) -> None:
    """Free what the frames of a caught exception hold, and give the device's cached memory back."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
