"""Collect the outputs of evaluation batches: gathered over ranks, moved to the host, joined once at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tr_core.protocols import Strategy

PADDING = -100

# Outputs stay on the device until they hold this much, so that a batch costs no wait and memory stays bounded.
DEVICE_LIMIT_BYTES = 256 * 2**20


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Apply a function to every tensor inside tuples, lists and mappings; other leaves become None."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, list | tuple):
        return tuple(map_tensors(function, item) for item in tree)
    if hasattr(tree, "items"):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    return None


def gather_rows(tensor: torch.Tensor, strategy: Strategy, count: int | None) -> torch.Tensor:
    """Join the rows of all ranks in the order of the data, without the rows that only fill up.

    Args:
        tensor: this rank's rows, shape `(rows, ...)`; ranks may differ in rows and in the second dimension, which is
            padded with -100.
        strategy: how to gather.
        count: rows of all ranks together where they are divided as `tr_core.order.take_slice` does; None asks them.
    """
    world = strategy.world_size
    if world == 1:
        return tensor
    tensor = torch.atleast_1d(tensor)
    width = tensor.shape[1] if tensor.dim() > 1 else 0
    mine = torch.tensor([[tensor.shape[0], width]], device=strategy.device)
    shapes = strategy.gather(mine).tolist()  # sync: evaluation only
    if count is None:
        rows = [shape[0] for shape in shapes]
    else:
        rows = [(rank + 1) * count // world - rank * count // world for rank in range(world)]
    height, width = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
    gathered = strategy.gather(_pad(tensor, height, width))
    return torch.cat([gathered[rank * height : rank * height + number] for rank, number in enumerate(rows)])


def _pad(tensor: torch.Tensor, height: int, width: int) -> torch.Tensor:
    shape = [height, *tensor.shape[1:]]
    if tensor.dim() > 1:
        shape[1] = width
    if list(tensor.shape) == shape:
        return tensor.contiguous()
    padded = tensor.new_full(shape, PADDING)
    corner = tuple(slice(0, size) for size in tensor.shape)
    padded[corner] = tensor
    return padded


class Collected:
    """The outputs of one kind, batch by batch, until `arrays` joins them.

    Every batch is copied to the host once and joined once, so the time for `n` samples grows like `n`.
    """

    def __init__(self) -> None:
        self._on_device: list[Any] = []
        self._on_host: list[Any] = []
        self._bytes = 0

    def add(self, tree: Any, flush: bool = False) -> None:
        """Keep a batch's outputs; `flush` moves everything held on the device to the host now."""
        self._on_device.append(tree)
        map_tensors(self._weigh, tree)
        if flush or self._bytes > DEVICE_LIMIT_BYTES:
            self._flush()

    def arrays(self, concatenate: bool = True) -> Any:
        """Return NumPy arrays of all samples, shaped as the outputs; None if there were none.

        Args:
            concatenate: join the batches, padding the second dimension with -100; else a list with one entry a batch.
        """
        self._flush()
        if not self._on_host:
            return None
        return _join(self._on_host) if concatenate else self._on_host

    def _weigh(self, tensor: torch.Tensor) -> None:
        self._bytes += tensor.numel() * tensor.element_size()

    def _flush(self) -> None:
        self._on_host.extend(map_tensors(_to_numpy, tree) for tree in self._on_device)
        self._on_device.clear()
        self._bytes = 0


def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # NumPy has no such type
        tensor = tensor.float()
    return np.atleast_1d(tensor.cpu().numpy())  # sync: evaluation only


def _join(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, tuple):
        return tuple(_join([batch[index] for batch in batches]) for index in range(len(first)))
    if isinstance(first, dict):
        return {key: _join([batch[key] for batch in batches]) for key in first}
    if first is None:
        return None
    if first.ndim == 1 or len({batch.shape[1] for batch in batches}) == 1:
        return np.concatenate(batches)
    width = max(batch.shape[1] for batch in batches)
    joined = np.full((sum(len(batch) for batch in batches), width, *first.shape[2:]), PADDING, dtype=first.dtype)
    row = 0
    for batch in batches:
        joined[row : row + len(batch), : batch.shape[1]] = batch
        row += len(batch)
    return joined
