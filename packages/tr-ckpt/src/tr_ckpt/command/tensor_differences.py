"""Find what differs between the tensors of two states, one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from tr_ckpt.command.saved_tensors import SavedTensors
from tr_ckpt.sharded.shard_index import SavedTensor

_BLOCK = 2**20  # elements that are compared at once

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that differs.

    Attributes:
        place: its name, after that of its file.
        dtypes: of both, one if they are the same; likewise `shapes`.
        shapes: see above.
        note: what is the matter with it, if it cannot be compared.
        largest: the largest absolute difference of two numbers.
        relative: the norm of the difference over that of the first tensor; infinite if that is 0.
        changed: how many elements are not the same bits.
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
        """What differences are sorted by: what cannot be compared, then NaN, then the relative one."""
        return bool(self.note), math.inf if self.undefined[0] != self.undefined[1] else self.relative


def compare_tensors(
    first: SavedTensors, second: SavedTensors, place: str, wanted: Callable[[str], bool]
) -> Iterator[tuple[str, TensorDifference | None]]:
    """Yield, for each tensor of two states, its place and how it differs: None if all its bits are the same.

    One tensor is in memory at a time, and of the numbers that differ a block.

    Args:
        first: the tensors of one state.
        second: those of the other.
        place: what the tensors' places begin with.
        wanted: tells by its place whether a tensor is compared.
    """
    names, others = first.names, set(second.names)
    for name in [*names, *sorted(others - set(names))]:
        inside = f"{place}.{name}"
        if not wanted(inside):
            continue
        if name not in others:
            yield inside, _alone(first.describe(name), inside, "only in A")
        elif name not in names:
            yield inside, _alone(second.describe(name), inside, "only in B")
        else:
            yield inside, _compare(first.load(name), second.load(name), inside)


def _alone(tensor: SavedTensor, place: str, note: str) -> TensorDifference:
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

    Where one is NaN there is no difference; where one is infinite and the other is not, it is infinite.
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
