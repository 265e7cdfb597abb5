"""Say whether boxes fill a whole without a gap and without an overlap."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

# Where a box begins, and how long it is, one number a dimension.
Box = tuple[tuple[int, ...], tuple[int, ...]]

# In which tensors are sharded; the corners of a box are two to the power of these.
_MOST_DIMENSIONS = 8


def is_filled(shape: Sequence[int], boxes: Sequence[Box]) -> bool:
    """Whether boxes, which lie inside `shape` and are not empty, hold each of its numbers once.

    In time that is in proportion to the boxes, whatever they are: each corner of a box counts 1 or -1, by how many of
    its sides end there. These counts determine how many boxes hold each number, so they must be those of the whole.
    Dimensions in which every box is as long as the whole are left out; those that are sharded may be 8.
    """
    if not math.prod(shape):
        return not boxes
    split = [axis for axis, whole in enumerate(shape) if any(size[axis] != whole for _, size in boxes)]
    if len(split) > _MOST_DIMENSIONS:
        return False
    counts: Counter[tuple[int, ...]] = Counter()
    for offset, size in boxes:
        _count(counts, [(offset[axis], offset[axis] + size[axis]) for axis in split], 1)
    _count(counts, [(0, shape[axis]) for axis in split], -1)
    return not any(counts.values())


def _count(counts: Counter[tuple[int, ...]], sides: Sequence[tuple[int, int]], weight: int) -> None:
    for ends in product((0, 1), repeat=len(sides)):
        corner = tuple(side[end] for side, end in zip(sides, ends, strict=True))
        counts[corner] += weight * (-1) ** sum(ends)
