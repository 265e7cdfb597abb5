"""Compute with large tensors piece by piece, in a precision that their sums need."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_ON_CPU, _ON_ACCELERATOR = 2**19, 2**23  # the latter keeps a device busy for longer than a kernel takes to start
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def computing_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that a tensor is computed with."""
    return torch.float32 if tensor.dtype in _LOW_PRECISION else tensor.dtype


def piece_size(tensor: torch.Tensor) -> int:
    """Return how many elements to compute with at a time, so that what it takes does not grow with the tensor."""
    return _ON_CPU if tensor.device.type == "cpu" else _ON_ACCELERATOR


def chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield tensors of one shape piece by piece, as flat views, or whole where their layout does not allow that."""
    size = piece_size(tensors[0])
    if tensors[0].numel() <= size or not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
    else:
        yield from zip(*(tensor.view(-1).split(size) for tensor in tensors), strict=True)
