"""Keep the rows of one output on the host: each is written once, to where it stays."""

from __future__ import annotations

import math

import numpy as np
import torch

from tr_core.evaluation.outputs import PADDING

# Rows whose number is not known beforehand are kept in pieces of this size.
BLOCK_BYTES = 64 * 2**20

_KNOWN_TO_NUMPY = (torch.float16, torch.float32, torch.float64)


class Rows:
    """The rows of one output, in the order in which they were added.

    They are written into one block that is as large as all of them will be, where their number is known and no batch
    is wider than the first: `join` then copies nothing. Else they are in several blocks, each of which is freed as
    `join` copies it. Either way a row is written at most three times, however many there are.

    Args:
        expected: how many rows there will be; None where that is not known. It need not be right.
    """

    def __init__(self, expected: int | None = None) -> None:
        self._expected = expected or 0
        # Of torch, not of NumPy: the latter asks for huge pages, and waits for them where memory is in pieces.
        self._blocks: list[torch.Tensor] = []
        self._used = 0  # rows of the last block
        self._total = 0

    def add(self, batch: torch.Tensor) -> None:
        """Copy a batch of shape `(rows, ...)` to the host; a scalar is a row of its own.

        Raises:
            ValueError: its shape differs from that of others beyond the second dimension.
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
        """Return all rows as one array and forget them; the second dimension is padded with -100."""
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
        # Memory of rows that are not written yet is not taken from the system either.
        self._blocks.append(torch.empty((max(rows, len(batch)), *batch.shape[1:]), dtype=batch.dtype))
        self._used = 0

    def _close_block(self) -> None:
        if self._blocks and self._used < len(self._blocks[-1]):
            used = self._blocks[-1][: self._used]
            # A block that is mostly empty would hold addresses that many others need, too.
            self._blocks[-1] = used.clone() if 2 * self._used < len(self._blocks[-1]) else used


def _write(rows: torch.Tensor, place: torch.Tensor) -> None:
    """Copy rows to where there is room for them, and for columns that are filled up with the padding."""
    if rows.dim() > 1 and rows.shape[1] < place.shape[1]:
        place[:, rows.shape[1] :] = PADDING
        place = place[:, : rows.shape[1]]
    place.copy_(rows)  # sync: evaluation only
