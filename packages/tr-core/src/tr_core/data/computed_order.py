"""Compute which sample is at a place of a random order, without a list of all samples.

The order is a keyed permutation: a function of seed, epoch and place. Memory, the first step and a resume at any
position cost the same for a thousand samples and for a trillion.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tr_core.random_state import derive_seed

ROUNDS = 8

AT_ONCE = 2048
"""Places that are computed together, at least: the cost of a call, shared by 2,000 places, is small."""

DRAWN_UP_TO = 4096
"""Up to so many samples the order is drawn whole: the halves of a Feistel network would be too small for it."""


class ComputedOrder:
    """A random order of the numbers below `num_samples`, whose slices are computed when they are read.

    A slice `order[a:b]` is a list of samples. One of `size` samples is taken for the share of a rank, which reads
    another one every `stride` places; the following ones are computed with it.

    Args:
        num_samples: samples of the data set, at most 2**62.
        size: samples of a slice, usually.
        stride: places from the start of one such slice to the next.

    Source: Black and Rogaway 2002, "Ciphers with arbitrary finite domains": the generalized Feistel network, here of 8
    rounds, and cycle walking. A place is a row and a column of a table with at most one column more than needed, so
    few places are walked. Deviations: the function of a round is the mixing function of SplitMix64 with a key, which is
    no cipher; and an order of few samples is sorted by such numbers instead.
    """

    def __init__(self, num_samples: int, seed: int, epoch: int, size: int = 1, stride: int = 1) -> None:
        self._count, self._size, self._stride = num_samples, size, stride
        # An even number: with two odd sides the network reaches even permutations only.
        self._rows = (math.isqrt(num_samples) // 2 + 1) * 2
        self._columns = -(-num_samples // self._rows)
        self._keys = [np.uint64(derive_seed(seed, epoch, number)) for number in range(1, ROUNDS + 1)]
        self._drawn: np.ndarray | None = None
        if num_samples <= DRAWN_UP_TO:
            self._drawn = _mix(np.arange(num_samples, dtype=np.uint64), self._keys[0]).argsort(kind="stable")
        self._ahead: list[list[int]] = []
        self._ahead_from = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, places: slice) -> list[int]:
        start, stop, _ = places.indices(self._count)
        if stop - start != self._size:  # a share of a short last micro-batch
            return self.at(np.arange(start, stop)).tolist()
        number, rest = divmod(start - self._ahead_from, self._stride)
        if rest or not 0 <= number < len(self._ahead):
            number = min(-(-AT_ONCE // self._size), (self._count - stop) // self._stride + 1)
            starts = start + self._stride * np.arange(number)
            self._ahead = self.at(starts[:, None] + np.arange(self._size)).tolist()
            self._ahead_from, number = start, 0
        return self._ahead[number]

    def __iter__(self) -> Iterator[int]:
        for start in range(0, self._count, AT_ONCE):
            yield from self.at(np.arange(start, min(start + AT_ONCE, self._count))).tolist()

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the samples at `places`, an array of whole numbers from 0 up to `num_samples`, of its shape."""
        if self._drawn is not None:
            return self._drawn[places]
        samples = self._permute(places.astype(np.uint64))
        while (outside := samples >= self._count).any():
            samples[outside] = self._permute(samples[outside])
        return samples.astype(np.int64)

    def _permute(self, places: np.ndarray) -> np.ndarray:
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        row, column = np.divmod(places, columns)
        for first, second in zip(self._keys[::2], self._keys[1::2], strict=True):
            row = (row + _mix(column, first)) % rows
            column = (column + _mix(row, second)) % columns
        return row * columns + column


def _mix(numbers: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return a number below 2**63 for each, the key's SplitMix64 stream at these places (wraps around 2**64)."""
    state = numbers * np.uint64(0x9E3779B97F4A7C15) + key
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (state ^ (state >> np.uint64(31))) >> np.uint64(1)


def in_its_memory(order: torch.Tensor) -> memoryview[int]:
    """Return an order as a sequence of Python's numbers, which are made as they are read."""
    values: Any = order.numpy()
    return memoryview(values)
