"""Find what differs between two states: tensors, and JSON values, by their paths.

Tensors are read one at a time, whether a part was saved whole or in shards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tr_ckpt.command.terminal import shorten
from tr_ckpt.sharded import reading
from tr_ckpt.sharded.reading import SlicedFiles
from tr_ckpt.sharded.shard_index import Index, SavedTensor


class SavedTensors:
    """The tensors of a part.

    Args:
        index: their locations.
        opened: the files that hold them.
    """

    def __init__(self, index: Index, opened: SlicedFiles) -> None:
        self._index = index
        self._opened = opened

    @property
    def names(self) -> list[str]:
        """Their names, sorted."""
        return sorted(self._index)

    def describe(self, name: str) -> SavedTensor:
        """Return dtype and shape of a tensor without reading it."""
        return self._index[name]

    def load(self, name: str) -> torch.Tensor:
        """Return a tensor: a view of its file if it is contiguous there, otherwise assembled in memory.

        Raises:
            CheckpointError: its file does not hold it.
        """
        saved = self._index[name]
        if len(saved.chunks) == 1:
            [chunk] = saved.chunks
            return self._opened.slice(name, chunk, (0,) * len(chunk.size), chunk.size)
        whole = torch.empty(saved.shape, dtype=saved.dtype)
        for chunk in saved.chunks:
            box = tuple(slice(at, at + size) for at, size in zip(chunk.offset, chunk.size, strict=True))
            whole[box] = self._opened.slice(name, chunk, (0,) * len(chunk.size), chunk.size)
        return whole

    def size_bytes(self, name: str) -> int:
        """Return how many bytes a tensor has; 0 if no tensor has that name."""
        saved = self._index.get(name)
        return 0 if saved is None else math.prod(saved.shape) * saved.dtype.itemsize


@contextmanager
def opened_tensors(folder: Path, stem: str, files: Sequence[str]) -> Iterator[SavedTensors]:
    """Open the tensors in the files whose names begin with `stem`.

    Args:
        folder: the checkpoint.
        stem: the part's name, with the rank if each rank has its own files.
        files: the part's files.

    Raises:
        CheckpointError: a file is not in the format of a save.
    """
    index = reading.read_index(folder, stem, files)
    with SlicedFiles(folder) as opened:
        yield SavedTensors(index, opened)


_BLOCK = 2**20  # elements that are compared at once

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs.

    Attributes:
        place: its path: the name after that of its file.
        dtypes: of both, or one if they are the same.
        shapes: of both, or one if they are the same.
        note: why it cannot be compared; empty if it can.
        largest: the largest absolute difference of two numbers.
        relative: the norm of the difference over that of the first tensor; infinite if that is 0.
        changed: how many elements differ in their bits.
        elements: how many there are.
        undefined: how many elements are NaN in each.
    """

    place: str
    dtypes: tuple[str, ...]
    shapes: tuple[str, ...]
    note: str = ""
    largest: float = math.inf
    relative: float = math.inf
    changed: int = 0
    elements: int = 0
    undefined: tuple[int, int] = (0, 0)

    @property
    def size(self) -> tuple[bool, float]:
        """The sort key of differences: those that cannot be compared, then NaN, then the relative difference."""
        return bool(self.note), math.inf if self.undefined[0] != self.undefined[1] else self.relative


def compare_tensors(
    first: SavedTensors, second: SavedTensors, place: str, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, TensorDifference | None]]:
    """Yield, for each tensor of two states, its path and its difference: None if all its bits are the same.

    One tensor is in memory at a time, and one block of the numbers that differ.

    Args:
        first: the tensors of one state.
        second: those of the other.
        place: the first part of the tensors' paths.
        wanted: whether to compare a tensor, given its path.
    """
    names, others = first.names, set(second.names)
    for name in [*names, *sorted(others - set(names))]:
        inside = f"{place}.{name}"
        if not wanted(inside):
            continue
        if name not in others:
            yield inside, _in_one_only(first.describe(name), inside, "only in A")
        elif name not in names:
            yield inside, _in_one_only(second.describe(name), inside, "only in B")
        else:
            yield inside, _compare(first.load(name), second.load(name), inside)


def _in_one_only(tensor: SavedTensor, place: str, note: str) -> TensorDifference:
    return TensorDifference(place, (_dtype(tensor),), (_shape(tensor),), note)


def _dtype(tensor: torch.Tensor | SavedTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor | SavedTensor) -> str:
    return str(list(tensor.shape))


def _compare(one: torch.Tensor, other: torch.Tensor, place: str) -> TensorDifference | None:
    same_kind = one.dtype == other.dtype
    dtypes = tuple(dict.fromkeys((_dtype(one), _dtype(other))))
    shapes = tuple(dict.fromkeys((_shape(one), _shape(other))))
    if len(shapes) > 1:
        return TensorDifference(place, dtypes, shapes, "another shape")
    if same_kind and all(torch.equal(a, b) for a, b in _blocks(_bits(one), _bits(other))):
        return None
    largest, relative, undefined = _measure(one, other)
    changed = one.numel()
    if same_kind:
        changed = sum(int((a != b).sum()) for a, b in _blocks(_bits(one), _bits(other)))
    note = "" if same_kind else "another dtype"
    return TensorDifference(place, dtypes, shapes, note, largest, relative, changed, one.numel(), undefined)


def _measure(one: torch.Tensor, other: torch.Tensor) -> tuple[float, float, tuple[int, int]]:
    """Return the largest absolute and the relative difference, and how many elements of each are NaN.

    The difference is 0 where one is NaN, and infinite where one is infinite and the other is not.
    """
    largest = squares = norm = 0.0
    undefined = [0, 0]
    for mine, theirs in _blocks(one, other):
        a, b = _numbers(mine), _numbers(theirs)
        undefined = [undefined[0] + int(a.isnan().sum()), undefined[1] + int(b.isnan().sum())]
        gap = (a - b).abs().where(a != b, 0.0)  # the same infinity twice is no difference
        gap = gap.where(~gap.isnan(), 0.0)
        largest = max(largest, float(gap.max()))
        squares += float(gap.square().sum())
        norm += float(a.where(a.isfinite(), 0.0).square().sum())
    if math.isfinite(squares) and norm > 0:
        return largest, math.sqrt(squares / norm), (undefined[0], undefined[1])
    return largest, math.inf if squares else 0.0, (undefined[0], undefined[1])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(_BITS[tensor.element_size()])


def _blocks(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    one, other = one.reshape(-1), other.reshape(-1)
    for start in range(0, one.numel(), _BLOCK):
        yield one[start : start + _BLOCK], other[start : start + _BLOCK]


def _numbers(block: torch.Tensor) -> torch.Tensor:
    if block.is_complex():
        block = torch.view_as_real(block)
    return block.to(torch.float64)


_LONGEST = 44  # characters shown of a value

_MOST_BITS = 4096  # of a number that is shown as digits

_PAIRS = ("$dict", "$ordered", "$counter")

_NUMBERS = {"$float": float, "$int": lambda content: int(content, 16)}


@dataclass(frozen=True)
class _Tagged:
    """A value that JSON does not have: bytes, a dtype, a tensor by its name."""

    tag: str
    content: Any


@dataclass(frozen=True)
class ValueDifference:
    """A value that differs.

    Attributes:
        place: its path, such as `scheduler.last_epoch`.
        text: the change, such as `10 -> 20`.
        size: the size of the change: for numbers the relative change, otherwise infinite.
    """

    place: str
    text: str
    size: float = float("inf")


def compare_values(first: Any, second: Any, place: str) -> Iterator[ValueDifference]:
    """Yield what differs between two values read from JSON, in the order of the first.

    Values that `codec.py` encodes, such as tuples and NaN, are decoded before they are compared.
    """
    one, other = _open(first), _open(second)
    if _kind(one) != _kind(other) or not isinstance(one, dict | list):
        if (leaves := _text(one)) != _text(other):
            yield ValueDifference(place, f"{_shown(leaves)} -> {_shown(_text(other))}", _change(one, other))
    elif isinstance(one, dict):
        yield from _compare_members(one, other, place)
    else:
        for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
            yield from compare_values(mine, theirs, f"{place}[{index}]")
        if len(one) != len(other):
            yield ValueDifference(place, f"{_items(len(one))} -> {_items(len(other))}")


def _compare_members(one: dict[str, Any], other: dict[str, Any], place: str) -> Iterator[ValueDifference]:
    for name, value in one.items():
        inside = _inside(place, name)
        if name in other:
            yield from compare_values(value, other[name], inside)
        else:
            yield ValueDifference(inside, f"only in A: {_shown(_text(_open(value)))}")
    for name, value in other.items():
        if name not in one:
            yield ValueDifference(_inside(place, name), f"only in B: {_shown(_text(_open(value)))}")


def _open(value: Any) -> Any:
    """Return the dict, list, number or other value that the JSON encodes."""
    if not isinstance(value, dict) or not value:
        return value
    [tag, *more] = value
    content = value[tag]
    if tag in _PAIRS and isinstance(content, list) and all(isinstance(pair, list) and pair[1:] for pair in content):
        members = {_key(pair[0]): pair[1] for pair in content}
        return members | {name.removeprefix("$"): value[name] for name in more}
    if more or not tag.startswith("$"):
        return value
    if tag == "$tuple":
        return content
    try:
        return _NUMBERS[tag](content) if tag in _NUMBERS else _Tagged(tag, content)
    except (TypeError, ValueError):  # another program's JSON
        return value


def _key(encoded: Any) -> str:
    opened = _open(encoded)
    return opened if isinstance(opened, str) else _text(opened)


def _kind(value: Any) -> type:
    return type(value) if isinstance(value, dict | list) else object


def _text(value: Any) -> str:
    if isinstance(value, _Tagged):
        return f"{value.tag[1:]} {value.content if isinstance(value.content, str) else json.dumps(value.content)}"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return hex(value)  # decimal digits take long, and Python refuses very long ones
    return json.dumps(value)


def _shown(text: str) -> str:
    return shorten(text, _LONGEST)


def _items(number: int) -> str:
    return f"{number} item{'s' * (number != 1)}"


def _inside(place: str, name: str) -> str:
    return f"{place}.{name}" if name.isidentifier() else f"{place}[{name}]"


def _change(one: Any, other: Any) -> float:
    if type(one) not in (int, float) or type(other) not in (int, float):
        return float("inf")
    try:
        change = abs(other - one) / max(abs(one), abs(other), 1e-300)
    except OverflowError:  # an integer outside the range of floats
        return float("inf")
    return change if change == change else float("inf")
