"""Compute with large tensors piece by piece, in a precision that their sums need."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tr_optim.moments.blockwise_int8 import BLOCK

_ON_CPU, _ON_ACCELERATOR = 2**19, 2**23  # the latter keeps a device busy for longer than a kernel takes to start
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def computing_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that a tensor is computed with."""
    return torch.float32 if tensor.dtype in _LOW_PRECISION else tensor.dtype


def piece_size(tensor: torch.Tensor) -> int:
    """Return how many elements to compute with at a time, so that what it takes does not grow with the tensor."""
    return _ON_CPU if tensor.device.type == "cpu" else _ON_ACCELERATOR


def chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield tensors of one shape piece by piece, as views, or whole where their layout does not allow that.

    A piece is some rows, or of a row that is too large alone a part, flat. Among the tensors may be scales, one for
    each block of 256 elements of a row (see `tr_optim.moments.blockwise_int8`); parts begin and end with a block.
    """
    size, count = piece_size(tensors[0]), tensors[0].numel()
    if count <= size or not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    rows = len(tensors[0]) if tensors[0].dim() > 1 else 1
    length, views = count // rows, [tensor.view(rows, -1) for tensor in tensors]
    if length <= size:
        yield from zip(*(view.split(size // length) for view in views), strict=True)
        return
    sizes = [size if view.shape[1] == length else size // BLOCK for view in views]
    for row in range(rows):
        yield from zip(*(view[row].split(n) for view, n in zip(views, sizes, strict=True)), strict=True)
