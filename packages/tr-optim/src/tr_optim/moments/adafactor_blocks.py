"""Adafactor's rule without a copy of the gradient or of the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tr_optim.engine import chunks
from tr_optim.engine.chunks import computing_dtype
from tr_optim.engine.rounding import put_back
from tr_optim.engine.shards import Shards


class BlockedUpdate:
    """One tensor's update, computed block by block: no copy of the tensor is made.

    `measure`, `take_in` and `apply` follow each other. The first two return what is to be added up, in place, over the
    ranks that hold other rows of the tensor, if there are such.

    Args:
        weights: the parameter, changed in place.
        gradient: of the same shape.
        factor: what the gradient is multiplied by.
        max_value: what its numbers are limited to then.
        whole: shape of the tensor of which these are some rows; None if these are all.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        factor: torch.Tensor | None,
        max_value: float | None,
        whole: torch.Size | None = None,
    ) -> None:
        shape = weights.shape if whole is None else whole
        self._has_rows, self._divides_matrix = len(shape) >= 2, whole is not None and len(shape) == 2
        self._num_rows, self._num_numbers = shape[-2] if self._has_rows else 1, shape.numel()
        self._parameter, contiguous = weights, weights.contiguous()
        self._weights, self._gradient = _as_matrices(contiguous), _as_matrices(gradient.contiguous())
        self._factor, self._max_value = factor, max_value
        self._dtype = computing_dtype(weights)
        self._blocks = list(_blocks(self._weights))
        self._kept: torch.Tensor | None = None
        self._scales: list[torch.Tensor] = []  # what a gradient is multiplied by, to be broadcast

    def measure(self, state: dict[str, Any], group: dict[str, Any]) -> list[torch.Tensor]:
        """Sum up squares: of the gradient by rows and columns, and of the weights."""
        count, rows, columns = self._weights.shape
        options: dict[str, Any] = {"device": self._weights.device, "dtype": self._dtype}
        means = torch.zeros((count, rows, 1), **options)
        self._columns = torch.zeros((count, 1, columns), **options)
        for block in self._blocks:
            squares = self._part(block).square_().add_(group["eps"][0])
            if self._has_rows:
                means[block] = squares.mean(dim=-1, keepdim=True)
            self._columns[block[0]] += squares.sum(dim=-2, keepdim=True)
        self._step = state["step"] + 1
        self._share = self._step.pow(group["decay_rate"])
        sizes = [torch.linalg.vector_norm(self._weights[block], dtype=self._dtype) for block in self._blocks]
        self._size = self._square(sizes)
        if not self._has_rows:
            return [self._size]
        self._row = torch.lerp(state["exp_avg_sq_row"].view_as(means), means, self._share)
        self._row_sum = self._row.sum(dim=-2, keepdim=True)
        return [self._size, self._columns, self._row_sum] if self._divides_matrix else [self._size]

    def take_in(
        self, state: dict[str, Any], group: dict[str, Any], leave_out: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Take the squared gradient into the second moment, and sum up the squares of the update."""
        before = state["exp_avg_sq_col" if self._has_rows else "exp_avg_sq"].view_as(self._columns)
        column = torch.lerp(before, self._columns.div_(self._num_rows), self._share)
        before.copy_(_unless(leave_out, column, before))
        scales = [column]
        if self._has_rows:
            before = state["exp_avg_sq_row"].view_as(self._row)
            before.copy_(_unless(leave_out, self._row, before))
            scales.insert(0, self._row.div_(self._row_sum.div_(self._num_rows)))
        state["step"].copy_(_unless(leave_out, self._step, state["step"]))
        self._scales = [scale.rsqrt_() for scale in scales]
        self._update_size = self._square([torch.linalg.vector_norm(self._update(block)) for block in self._blocks])
        return [self._update_size]

    def apply(
        self, group: dict[str, Any], leave_out: torch.Tensor | None, generator: torch.Generator | None = None
    ) -> None:
        """Change the weights; `generator` rounds those of low precision stochastically."""
        rate = self._rms(self._size).clamp_(min=group["eps"][1]) * group["lr"]
        size = rate / (self._rms(self._update_size) / group["clip_threshold"]).clamp_(min=1.0)
        for block in self._blocks:
            weights = self._weights[block]
            new = weights.to(self._dtype, copy=leave_out is not None)
            if group["weight_decay"] != 0:
                new.mul_(1 - rate * group["weight_decay"])
            new.sub_(self._update(block).mul_(size))
            put_back(weights, _unless(leave_out, new, weights), generator)
        if not self._parameter.is_contiguous():
            self._parameter.copy_(self._weights.view(self._parameter.shape))

    def _part(self, block: tuple[slice, slice]) -> torch.Tensor:
        """Return a block of the gradient, a copy in the dtype it is computed with."""
        part = self._gradient[block].to(self._dtype, copy=True)
        if self._factor is not None:
            part.mul_(self._factor)
        if self._max_value is not None:
            part.clamp_(-self._max_value, self._max_value)
        return part

    def _update(self, block: tuple[slice, slice]) -> torch.Tensor:
        """Return a block of the update before its limit; the only block is computed once."""
        if self._kept is not None:
            return self._kept
        update = self._part(block)
        for scale in self._scales:
            # A row's scale has the block's rows, a column's all that there are.
            update.mul_(scale[block] if scale.shape[1] > 1 else scale[block[0]])
        if len(self._blocks) == 1:
            self._kept = update
        return update

    def _square(self, norms: list[torch.Tensor]) -> torch.Tensor:
        if not norms:  # this rank has no row
            return torch.zeros((), device=self._weights.device, dtype=self._dtype)
        return torch.linalg.vector_norm(torch.stack(norms)).square_()

    def _rms(self, square: torch.Tensor) -> torch.Tensor:
        return (square / self._num_numbers).sqrt_()


def start(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """Give a new state its moments, all zero, and its step count; `parameter` may be some rows of a whole one."""
    options: dict[str, Any] = {"device": parameter.device, "dtype": computing_dtype(parameter)}
    state["step"] = torch.zeros((), **options)
    state |= {name: torch.zeros(shape, **options) for name, shape in state_shapes(parameter.shape).items()}


def state_shapes(shape: torch.Size) -> dict[str, torch.Size]:
    """Return the moments of a parameter of a shape, by name."""
    if len(shape) < 2:
        return {"exp_avg_sq": shape}
    return {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]}


def is_divided(name: str, shards: Shards, group: Mapping[str, Any]) -> bool:
    """Whether a moment of a parameter in shards has its rows; column means of a matrix are the same on all ranks."""
    return not (name == "exp_avg_sq_col" and shards.divides_matrix)


def _as_matrices(tensor: torch.Tensor) -> torch.Tensor:
    shape = tensor.shape
    return tensor.view(shape[:-2].numel(), *shape[-2:]) if len(shape) >= 2 else tensor.view(1, 1, tensor.numel())


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield which matrices and which of their rows to compute with at a time: several matrices, or a part of one."""
    count, rows, columns = tensor.shape
    limit = chunks.piece_size(tensor)
    if tensor.numel() == 0:
        return
    if rows * columns <= limit:
        size = max(1, limit // (rows * columns))
        for start in range(0, count, size):
            yield slice(start, start + size), slice(None)
    else:
        size = max(1, limit // columns)
        for number_of in range(count):
            for start in range(0, rows, size):
                yield slice(number_of, number_of + 1), slice(start, start + size)


def _unless(leave_out: torch.Tensor | None, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new if leave_out is None else torch.where(leave_out, old, new)
