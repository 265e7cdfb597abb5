"""Allow or forbid TF32, which rounds the factors of float32 products to 10 bits, for a block."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def has_tf32(device: torch.device) -> bool:
    """Whether a device computes in TF32: an NVIDIA GPU of compute capability 8.0 or later."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


def check_tf32(allow: bool | None, device: torch.device) -> None:
    """Raise `ValueError` if TF32 is asked for where there is none."""
    if allow and not has_tf32(device):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise ValueError(
            f"tf32=True needs an NVIDIA GPU of compute capability 8.0 or later, and this run is on {name}; leave tf32 "
            "out"
        )


@contextmanager
def tf32(allow: bool | None) -> Iterator[None]:
    """Allow or forbid TF32 in matrix products and convolutions within the block; None leaves torch's settings."""
    if allow is None:
        yield
        return
    products, convolutions = _products(), torch.backends.cudnn.allow_tf32
    named = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    _set("high" if allow else "highest", convolutions=allow)
    try:
        yield
    finally:
        _set(products, convolutions=convolutions)
        if named is not None:
            torch.backends.cuda.matmul.fp32_precision = named


def _set(products: str, *, convolutions: bool) -> None:
    """Set both by the older interface: torch keeps the newer one in step with it, but not the other way round."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)  # torch 2.9
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def _products() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set through the newer interface alone, which is put back by its own name
        return "highest"
