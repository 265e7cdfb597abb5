"""Adafactor's rule without a copy of the gradient or of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tr_optim.engine import chunks
from tr_optim.engine.chunks import computing_dtype


class BlockedUpdate:
    """One tensor's update, computed block by block: no copy of the tensor is made.

    Args:
        weights: the parameter, or a contiguous copy of it; changed in place.
        gradient: of the same shape.
        factor: what the gradient is multiplied by.
        max_value: what its numbers are limited to then.
    """

    def __init__(
        self, weights: torch.Tensor, gradient: torch.Tensor, factor: torch.Tensor | None, max_value: float | None
    ) -> None:
        self._has_rows = weights.dim() >= 2
        self._weights, self._gradient = _as_matrices(weights), _as_matrices(gradient.contiguous())
        self._factor, self._max_value = factor, max_value
        self._dtype = computing_dtype(weights)
        self._blocks = list(_blocks(self._weights))
        self._kept: torch.Tensor | None = None
        self._scales: list[torch.Tensor] = []  # what a gradient is multiplied by, to be broadcast

    def take_in(self, state: dict[str, Any], group: dict[str, Any], leave_out: torch.Tensor | None) -> None:
        """Take the squared gradient into the second moment."""
        count, rows, columns = self._weights.shape
        step = state["step"] + 1
        share = step.pow(group["decay_rate"])
        names = ["exp_avg_sq_row", "exp_avg_sq_col"] if self._has_rows else ["exp_avg_sq"]
        new = [torch.zeros((count, rows, 1), device=self._weights.device, dtype=self._dtype)] if self._has_rows else []
        new.append(torch.zeros((count, 1, columns), device=self._weights.device, dtype=self._dtype))
        for block in self._blocks:
            squares = self._part(block).square_().add_(group["eps"][0])
            if self._has_rows:
                new[0][block] = squares.mean(dim=-1, keepdim=True)
            new[-1][block[0]] += squares.sum(dim=-2, keepdim=True)
        new[-1] /= rows
        moments = []
        for name, value in zip(names, new, strict=True):
            before = state[name].view_as(value)
            moment = torch.lerp(before, value, share)
            moments.append(moment)
            before.copy_(_unless(leave_out, moment, before))
        if self._has_rows:
            row = moments[0]
            moments[0] = row / row.mean(dim=-2, keepdim=True)
        state["step"].copy_(_unless(leave_out, step, state["step"]))
        self._scales = [moment.rsqrt_() for moment in moments]

    def apply(self, group: dict[str, Any], leave_out: torch.Tensor | None) -> None:
        """Change the weights."""
        updates, sizes = [], []
        for block in self._blocks:
            updates.append(torch.linalg.vector_norm(self._update(block)))
            sizes.append(torch.linalg.vector_norm(self._weights[block], dtype=self._dtype))
        rate = self._rms(sizes).clamp_(min=group["eps"][1]) * group["lr"]
        size = rate / (self._rms(updates) / group["clip_threshold"]).clamp_(min=1.0)
        for block in self._blocks:
            weights = self._weights[block]
            new = weights.to(self._dtype, copy=leave_out is not None)
            if group["weight_decay"] != 0:
                new.mul_(1 - rate * group["weight_decay"])
            new.sub_(self._update(block).mul_(size))
            weights.copy_(_unless(leave_out, new, weights))

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

    def _rms(self, norms: list[torch.Tensor]) -> torch.Tensor:
        return torch.linalg.vector_norm(torch.stack(norms)) / self._weights.numel() ** 0.5


def start(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """Give a new state its moments, all zero, and its step count."""
    options: dict[str, Any] = {"device": parameter.device, "dtype": computing_dtype(parameter)}
    state["step"] = torch.zeros((), **options)
    if parameter.dim() >= 2:
        state["exp_avg_sq_row"] = torch.zeros(parameter.shape[:-1], **options)
        state["exp_avg_sq_col"] = torch.zeros((*parameter.shape[:-2], parameter.shape[-1]), **options)
    else:
        state["exp_avg_sq"] = torch.zeros(parameter.shape, **options)


def _as_matrices(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1, *tensor.shape[-2:]) if tensor.dim() >= 2 else tensor.view(1, 1, -1)


def _blocks(tensor: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield which matrices and which of their rows to compute with at a time: several matrices, or a part of one."""
    count, rows, columns = tensor.shape
    limit = chunks.piece_size(tensor)
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
