"""Change the precision of computation inside a block: TF32 products, or a whole model in a lower precision.

TF32 rounds the factors of float32 products to 10 bits. After the block a model in a lower precision has its original
weights.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn


def has_tf32(device: torch.device) -> bool:
    """Whether a device computes in TF32: an NVIDIA GPU of compute capability 8.0 or later."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 8


def check_tf32(allow: bool | None, device: torch.device) -> None:
    """Raise `ValueError` if TF32 is requested on a device without it."""
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
    """Set both by the older interface: torch syncs the newer one with it, but not vice versa."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings", UserWarning)  # torch 2.9
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


def _products() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # set through the newer interface alone; it is restored through that
        return "highest"


@contextmanager
def in_precision(model: nn.Module, dtype: torch.dtype, label_names: Sequence[str] = ()) -> Iterator[None]:
    """Cast a model to `dtype` within the block: weights, buffers and floating-point inputs.

    Afterwards the weights are bit for bit what they were. In the block an accelerator holds only the cast weights; the
    originals are in host memory. A CPU holds both.

    Args:
        model: the unwrapped model; it keeps its module and parameter objects in and after the block.
        dtype: a floating-point type.
        label_names: inputs that are not cast, for the loss.
    """
    handle = model.register_forward_pre_hook(_caster(dtype, frozenset(label_names)), with_kwargs=True)
    originals: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor, original in _parked(model, dtype):
            originals.append((tensor, original))
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        handle.remove()
        for tensor, original in originals:
            tensor.data = original.to(tensor.device)


def _parked(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor to cast, one at a time, with its copy in host memory."""
    tensors = [t for t in chain(model.parameters(), model.buffers()) if t.is_floating_point() and t.dtype != dtype]
    sharers = Counter(_storage(tensor) for tensor in tensors)
    for tensor in tensors:
        # Moving tensors would separate those that share memory.
        is_alone = sharers[_storage(tensor)] == 1
        yield tensor, tensor.data.to("cpu") if is_alone else tensor.data


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _caster(dtype: torch.dtype, kept: frozenset[str]) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {name: value if name in kept else cast(value) for name, value in kwargs.items()}
        return tuple(map(cast, args)), named

    return cast_inputs
