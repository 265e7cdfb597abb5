"""Put tensors in the place of their descriptions in a state whose values may be shared, and bound what it stands for.

In a pickle a value is written once and referred to from many places, also from values that are themselves shared: a few
hundred bytes may stand for more values than a memory holds, as soon as somebody walks through them. Here each is
visited once, what was shared is shared afterwards, and how many values there are in all is counted without a walk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from tr_ckpt.errors import CheckpointError

# No state of an optimizer, schedule or generator is nested as deeply.
MOST_DEPTH = 100

# What a state may come to where all that is shared is written out: so much in any case, else so many times the bytes
# that hold it.
MOST_VALUES = 1_000_000
MOST_BYTES = 64_000_000
TIMES_THE_FILE = 16

_LEAVES = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, torch.Tensor)

# Values and bytes of text that something stands for, its members included.
_Weight = tuple[int, int]


class Finishing:
    """One pass over a state; it is changed in place where it can be.

    Args:
        size_bytes: of what holds it.
        replace: returns what a value that is no container becomes: a tensor for its description.
    """

    def __init__(self, size_bytes: int, replace: Callable[[Any], Any]) -> None:
        self._limits = max(MOST_VALUES, TIMES_THE_FILE * size_bytes), max(MOST_BYTES, TIMES_THE_FILE * size_bytes)
        self._size_bytes = size_bytes
        self._replace = replace
        self._done: dict[int, tuple[Any, Any, _Weight]] = {}  # with the value itself, so that its number stays its own
        self._open: set[int] = set()

    def finish(self, value: Any) -> Any:
        """Return the state.

        Raises:
            CheckpointError: it contains itself, is nested too deeply, stands for too much, or holds something that is
                no state.
        """
        done, (values, size) = self._visit(value, 0)
        if values > self._limits[0] or size > self._limits[1]:
            raise CheckpointError(
                f"it stands for {_some(values)} values with {_some(size)} bytes of text, and what {self._size_bytes:,} "
                f"bytes hold may stand for {self._limits[0]:,} and {self._limits[1]:,}: the same ones are in it again "
                "and again"
            )
        return done

    def _visit(self, value: Any, depth: int) -> tuple[Any, _Weight]:
        if type(value) in (str, bytes):
            return value, (1, len(value))
        if type(value) in (int, float, bool, type(None)):
            return value, (1, value.bit_length() // 8 if type(value) is int else 0)
        if (known := self._done.get(id(value))) is not None:
            return known[1], known[2]
        if id(value) in self._open:
            raise CheckpointError("it contains itself; a state must be a tree")
        if depth > MOST_DEPTH:
            raise CheckpointError(f"it is nested more than {MOST_DEPTH} deep")
        self._open.add(id(value))
        done, weight = self._members(value, depth + 1)
        self._open.discard(id(value))
        self._done[id(value)] = value, done, weight
        return done, weight

    def _members(self, value: Any, depth: int) -> tuple[Any, _Weight]:
        if type(value) in (list, tuple):
            visited = [self._visit(item, depth) for item in value]
            items = [done for done, _ in visited]
            if type(value) is list:
                value[:] = items
            return value if type(value) is list else tuple(items), _sum(weight for _, weight in visited)
        if isinstance(value, dict):
            weights = []
            for key in value:
                value[key], weight = self._visit(value[key], depth)
                weights += [weight, self._visit(key, depth)[1]]
            metadata = vars(value).get("_metadata") if isinstance(value, OrderedDict) else None
            if metadata is not None:
                value._metadata, weight = self._visit(metadata, depth)  # pyright: ignore[reportAttributeAccessIssue]
                weights.append(weight)
            return value, _sum(weights)
        if type(value) in (set, frozenset):
            return value, _sum(self._visit(key, depth)[1] for key in value)
        done = self._replace(value)
        if not isinstance(done, _LEAVES):
            raise CheckpointError(f"it holds a {type(done).__name__} where a value must be")
        return done, (1, 0)


def _sum(weights: Any) -> _Weight:
    values, size = 1, 0
    for more, bytes_more in weights:
        values, size = values + more, size + bytes_more
    return values, size


def _some(number: int) -> str:
    return f"{number:,}" if number < 10**15 else "more than 10^15"
