"""Collect the outputs of evaluation batches, on their way from the device to the host."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from tr_core.evaluation.gather import PADDING, map_objects, map_tensors

# Outputs stay on an accelerator up to this size, so that a batch costs no sync and memory stays bounded.
DEVICE_LIMIT_BYTES = 256 * 2**20

_NOTHING_YET = object()


class OutputBuffer:
    """Collects outputs of one kind batch by batch, until `arrays` joins them.

    A list in the outputs holds objects of any kind; tuples and dicts hold tensors, lists, and None.
    """

    def __init__(self, expected: int | None = None, *, concatenate: bool = True) -> None:
        self._expected, self._concatenate = expected, concatenate
        self._on_device: list[Any] = []
        self._bytes = 0
        self._joined: Any = _NOTHING_YET
        self._batches: list[Any] = []

    def add(self, tree: Any, flush: bool = False) -> None:
        """Keep a batch's outputs; `flush` moves everything held on the device to the host now.

        Raises:
            ValueError: their structure differs from that of earlier batches.
        """
        self._on_device.append(tree)
        self._is_on_host = True
        map_tensors(self._weigh, tree)
        # Outputs on the host are stored while they are in the processor's cache.
        if flush or self._is_on_host or self._bytes > DEVICE_LIMIT_BYTES:
            self._flush()

    def arrays(self) -> Any:
        """Return NumPy arrays of all samples, shaped as the outputs, and drop them; None if there were none.

        Batches are joined, with the second dimension padded with -100, or a list with one entry a batch.
        """
        self._flush()
        if not self._concatenate:
            return None if all(batch is None for batch in self._batches) else self._batches
        joined, self._joined = self._joined, _NOTHING_YET
        return None if joined is _NOTHING_YET else _join(joined)

    def _weigh(self, tensor: torch.Tensor) -> None:
        self._bytes += tensor.numel() * tensor.element_size()
        self._is_on_host = self._is_on_host and tensor.device.type == "cpu"

    def _flush(self) -> None:
        for tree in self._on_device:
            if self._concatenate:
                self._joined = _append(self._joined, tree, self._expected)
            else:
                self._batches.append(_apart(tree))
        self._on_device.clear()
        self._bytes = 0


def _append(kept: Any, tree: Any, expected: int | None) -> Any:
    """Add a batch to the kept outputs and return those."""
    is_first = kept is _NOTHING_YET
    if not is_first and _outline(kept) != _outline(tree):
        raise ValueError(
            f"the outputs of two batches of an evaluation have different structures: {_outline(kept)} before, "
            f"{_outline(tree)} now; leave out what differs with ignore_keys or preprocess_logits_for_metrics"
        )
    if isinstance(tree, torch.Tensor):
        rows = Rows(expected) if is_first else kept
        rows.add(tree)
        return rows
    if isinstance(tree, list):
        objects = [] if is_first else kept
        objects += map_objects(_object_to_numpy, tree)
        return objects
    if isinstance(tree, tuple):
        parts = (_NOTHING_YET,) * len(tree) if is_first else kept
        return tuple(_append(part, item, expected) for part, item in zip(parts, tree, strict=True))
    if isinstance(tree, dict):
        named = dict.fromkeys(tree, _NOTHING_YET) if is_first else kept
        return {key: _append(named[key], value, expected) for key, value in tree.items()}
    return None


def _outline(tree: Any) -> str:
    if isinstance(tree, dict):
        return f"a dict of {sorted(map(str, tree))}"
    if isinstance(tree, tuple):
        return f"a tuple of {len(tree)}"
    if tree is None:
        return "nothing"
    return "a list of objects" if isinstance(tree, list) else "a tensor"


def _join(kept: Any) -> Any:
    if isinstance(kept, Rows):
        return kept.join()
    if isinstance(kept, tuple):
        return tuple(_join(part) for part in kept)
    if isinstance(kept, dict):
        return {key: _join(part) for key, part in kept.items()}
    return kept


def _apart(tree: Any) -> Any:
    """Return one batch as arrays, shaped as the outputs."""
    if isinstance(tree, torch.Tensor):
        rows = Rows(len(tree) if tree.dim() else 1)
        rows.add(tree)
        return rows.join()
    if isinstance(tree, tuple):
        return tuple(_apart(item) for item in tree)
    if isinstance(tree, dict):
        return {key: _apart(value) for key, value in tree.items()}
    return map_objects(_object_to_numpy, tree)


def _object_to_numpy(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


# Without an expected number, rows are kept in blocks of this size.
BLOCK_BYTES = 64 * 2**20

_KNOWN_TO_NUMPY = (torch.float16, torch.float32, torch.float64)


class Rows:
    """The rows of one output, in the order in which they were added.

    With a known number of rows, and no batch wider than the first, they go into one block of the final size. `join`
    then copies nothing. Otherwise they go into several blocks, and `join` frees each block after its copy. Either way a
    row is written at most three times, for any number of rows.
    """

    def __init__(self, expected: int | None = None) -> None:
        self._expected = expected or 0
        # Allocated by torch, not NumPy: NumPy requests huge pages, and waits for them if memory is fragmented.
        self._blocks: list[torch.Tensor] = []
        self._used = 0  # used rows of the last block
        self._total = 0

    def add(self, batch: torch.Tensor) -> None:
        """Copy a batch of shape `(rows, ...)` to the host; a scalar is a row of its own.

        Raises:
            ValueError: its shape differs from that of other batches beyond the second dimension.
        """
        batch = torch.atleast_1d(batch.detach())
        if batch.dtype.is_floating_point and batch.dtype not in _KNOWN_TO_NUMPY:
            batch = batch.float()
        if not self._blocks or not self._fits(batch, self._blocks[-1]):
            self._open_block(batch)
        end = self._used + len(batch)
        _write(batch, self._blocks[-1][self._used : end])
        self._used, self._total = end, self._total + len(batch)

    def join(self) -> np.ndarray:
        """Return all rows as one array and drop them; the second dimension is padded with -100."""
        self._close_block()
        if len(self._blocks) == 1:
            return self._blocks.pop().numpy()
        dtype = self._blocks[0].dtype
        for block in self._blocks:
            dtype = torch.promote_types(dtype, block.dtype)
        shape = [self._total, *self._blocks[0].shape[1:]]
        if len(shape) > 1:
            widths = {block.shape[1] for block in self._blocks}
            shape[1] = max(widths)
            if len(widths) > 1 and not dtype.is_signed:
                dtype = torch.int64  # which can hold the padding
        joined = torch.empty(shape, dtype=dtype)
        self._blocks.reverse()
        row = 0
        while self._blocks:
            block = self._blocks.pop()
            _write(block, joined[row : row + len(block)])
            row += len(block)
        return joined.numpy()

    def _fits(self, batch: torch.Tensor, block: torch.Tensor) -> bool:
        if batch.dim() != block.dim() or batch.shape[2:] != block.shape[2:]:
            raise ValueError(
                f"an output has shape {tuple(batch.shape)} in one batch of an evaluation and (..., "
                f"{', '.join(map(str, block.shape[1:]))}) in another; only the first two dimensions may differ. Leave "
                "it out with ignore_keys, or make it even in preprocess_logits_for_metrics"
            )
        if batch.dtype != block.dtype or self._used + len(batch) > len(block):
            return False
        if batch.dim() == 1 or batch.shape[1] == block.shape[1]:
            return True
        return batch.shape[1] < block.shape[1] and batch.dtype.is_signed

    def _open_block(self, batch: torch.Tensor) -> None:
        self._close_block()
        row_bytes = max(math.prod(batch.shape[1:]) * batch.element_size(), 1)
        left = self._expected - self._total
        rows = left if left > 0 else BLOCK_BYTES // row_bytes
        # The system does not allocate memory of unwritten rows either.
        self._blocks.append(torch.empty((max(rows, len(batch)), *batch.shape[1:]), dtype=batch.dtype))
        self._used = 0

    def _close_block(self) -> None:
        if self._blocks and self._used < len(self._blocks[-1]):
            used = self._blocks[-1][: self._used]
            # A mostly empty block would also hold addresses that other blocks need.
            self._blocks[-1] = used.clone() if 2 * self._used < len(self._blocks[-1]) else used


def _write(rows: torch.Tensor, place: torch.Tensor) -> None:
    """Copy rows into a block, and pad its surplus columns."""
    if rows.dim() > 1 and rows.shape[1] < place.shape[1]:
        place[:, rows.shape[1] :] = PADDING
        place = place[:, : rows.shape[1]]
    place.copy_(rows)  # sync: evaluation only
