"""Take only plain state from what `torch.load(weights_only=True)` returns: tensors, numbers, text and containers.

It executes nothing that a file names. But a pickle writes a value once and may refer to it from many places, also from
values that are themselves shared. A few hundred bytes may therefore expand to more values than memory can hold, if the
state is walked naively; a tensor of one number may have any shape. `PlainState` visits each value once, keeps shared
values shared, and computes the expanded size without expanding. NumPy's arrays and scalars become tensors and numbers.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import torch

from tr_ckpt import untrusted
from tr_ckpt.errors import CheckpointError

# Deeper than any state of an optimizer, schedule or generator.
MOST_DEPTH = 100

# The limit for dimensions of a tensor, as in NumPy.
_MOST_DIMENSIONS = 64

# The limit for a state with all shared values expanded, and for its tensors, each counted in full: this much in any
# case, or this many times the bytes that hold it.
MOST_VALUES = 1_000_000
MOST_BYTES = 64_000_000
TIMES_THE_FILE = 16

_LEAVES = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size, torch.Tensor)

# Number of values, and of bytes of text, that a value expands to, members included.
_Weight = tuple[int, int]


class PlainState:
    """One traversal of a state; it is changed in place if possible.

    Args:
        size_bytes: size of the file that holds it.
    """

    def __init__(self, size_bytes: int) -> None:
        self._limits = max(MOST_VALUES, TIMES_THE_FILE * size_bytes), max(MOST_BYTES, TIMES_THE_FILE * size_bytes)
        self._size_bytes = size_bytes
        self._tensor_bytes = 0
        self._done: dict[int, tuple[Any, Any, _Weight]] = {}  # keeps the value itself, so that its id is not reused
        self._open: set[int] = set()

    def take(self, value: Any) -> Any:
        """Return the state.

        Raises:
            CheckpointError: it contains itself, is nested too deeply, expands to too much, or holds a value that is
                no state.
        """
        done, (values, size) = self._visit(value, 0)
        if values > self._limits[0] or size > self._limits[1]:
            raise CheckpointError(
                f"it stands for {_count(values)} values with {_count(size)} bytes of text, and what "
                f"{self._size_bytes:,} bytes hold may stand for {self._limits[0]:,} and {self._limits[1]:,}: the same "
                "ones are in it again and again"
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
        if type(value) in (dict, OrderedDict, Counter):
            weights = []
            untrusted.check_keys(value)
            for key in value:
                value[key], weight = self._visit(value[key], depth)
                weights += [weight, self._visit(key, depth)[1]]
            own = getattr(value, "__dict__", {})
            if own.keys() - {"_metadata"}:  # versions of a module's state
                raise CheckpointError(f"it gives a {type(value).__name__} attributes, which are not read")
            metadata = own.get("_metadata")
            if metadata is not None:
                own["_metadata"], weight = self._visit(metadata, depth)
                weights.append(weight)
            return value, _sum(weights)
        if type(value) in (set, frozenset):
            return value, _sum(self._visit(key, depth)[1] for key in value)
        done = _from_numpy(value)
        if isinstance(done, torch.Tensor):
            done = self._tensor(done)
        if not isinstance(done, _LEAVES):
            raise CheckpointError(f"it holds a {type(done).__name__} where a value must be")
        return done, (1, 0)

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
            raise CheckpointError(f"it holds a {type(tensor).__name__} ({tensor.layout}, {tensor.device}) as a tensor")
        if tensor.dim() > _MOST_DIMENSIONS:
            raise CheckpointError(f"it holds a tensor of {tensor.dim()} dimensions; up to {_MOST_DIMENSIONS} are read")
        # Overlapping and repeating tensors become full tensors when they are copied.
        self._tensor_bytes += tensor.numel() * tensor.element_size()
        if self._tensor_bytes > self._limits[1]:
            raise CheckpointError(
                f"its tensors come to more than {TIMES_THE_FILE} times its {self._size_bytes:,} bytes: they repeat the "
                "same numbers. Save what is not repeated, as tensor.clone() of it"
            )
        return tensor.detach()


def _from_numpy(value: Any) -> Any:
    """Return a NumPy array as a tensor, and a scalar as a number; anything else as it is.

    Raises:
        CheckpointError: it is not an array of numbers that torch has.
    """
    if type(value).__module__ != "numpy":
        return value
    try:
        return torch.tensor(value) if value.ndim else value.item()
    except TypeError as error:
        raise CheckpointError(
            f"it holds a NumPy value of dtype {value.dtype}; numbers and booleans are read"
        ) from error


def _sum(weights: Any) -> _Weight:
    values, size = 1, 0
    for more, bytes_more in weights:
        values, size = values + more, size + bytes_more
    return values, size


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**15 else "more than 10^15"
