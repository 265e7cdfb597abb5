"""Estimate the bytes of gradients and optimizer states before training."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tr_optim.engine.precision import computing_dtype
from tr_optim.engine.settings import Place, Projection
from tr_optim.engine.shards import local_part
from tr_optim.projection.basis import projected_shape, sides

Placed = Sequence[tuple[torch.Tensor, Place]]


def gradient_bytes(placed: Placed, projection: Projection, micro_batches: int, *, needs_whole: bool) -> int:
    """Return the peak bytes of gradients and their kept parts, over all steps.

    The mode keeps some between backward passes and step. The two largest gradients consumed in backward are added,
    because the next one may be computed before one is freed. A copy of one is added if they are computed in a higher
    precision. In a first step of several micro-batches all matrices find a basis, from their whole sums. For sharded
    parameters, this rank's parts count.

    Args:
        placed: parameters with their places.
        projection: how gradients are projected.
        micro_batches: backward passes of a step.
        needs_whole: whether updates need whole gradients too.
    """
    trainable = [(p, place) for p, place in placed if p.requires_grad]
    if projection.mode == "step":
        return sum(_size(p) for p, _ in trainable)
    applies, total, sizes, copied = projection.mode == "immediate", 0, [0], [0]
    for parameter, place in trainable:
        size, numel, dtype = _size(parameter), local_part(parameter).numel(), computing_dtype(parameter)
        if not (applies or place.is_projected):
            # A part of a gradient is copied out of the tensor of many, in the dtype of its update.
            total += size if local_part(parameter) is parameter else numel * dtype.itemsize
            continue
        sizes.append(size)
        copied.append(numel * dtype.itemsize if dtype != parameter.dtype else 0)
        sums_whole = needs_whole or not place.is_projected or projection.refresh_from == "all"
        if micro_batches > 1 and sums_whole:
            total += numel * dtype.itemsize
        elif micro_batches > 1 or not applies:
            total += _projected_numel(parameter, place.group) * dtype.itemsize
    return total + sum(sorted(sizes)[-2:]) + max(copied)


def state_bytes(optimizer: Any, step: Callable[[Any], Any]) -> int:
    """Return the bytes of an optimizer's state; without one, of the state after its first step.

    A copy of it makes a step on meta parameters, one of each shape in a group.

    Args:
        optimizer: an optimizer that can be copied without its state.
        step: makes the step of a copy whose parameters have gradients.
    """
    if optimizer.state:
        return sum(map(_bytes, optimizer.state.values()))
    twin, counts = copy.copy(optimizer), Counter()
    twin.state, twin.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        shapes: dict[Any, torch.Tensor] = {}
        for parameter in group["params"]:
            if parameter.requires_grad:
                key = (parameter.shape, parameter.dtype)
                if key not in shapes:
                    shapes[key] = _shape_of(parameter)
                counts[shapes[key]] += 1
        twin.param_groups.append({**group, "params": list(shapes.values())})
    step(twin)
    return sum(counts[shape] * _bytes(state) for shape, state in twin.state.items())


def optimizer_bytes(optimizer: Any, micro_batches: int = 1) -> tuple[int, int]:
    """Return the bytes of all gradients, and of the state after a step; of shards, this rank's.

    It is the `expected_bytes` of an optimizer that reads gradients from `.grad`: several micro-batches take no more.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return sum(map(_size, parameters)), state_bytes(optimizer, type(optimizer).step)


def _size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, or of this rank's part of it."""
    return local_part(tensor).numel() * tensor.element_size()


def _projected_numel(parameter: torch.Tensor, group: dict[str, Any]) -> int:
    rank, proj_type = group["rank"], group["proj_type"]
    shape = projected_shape(parameter.shape, rank, proj_type)
    has_rows = parameter.dim() > 2 or not sides(parameter.shape, proj_type)[0]
    return torch.Size((len(local_part(parameter)), *shape[1:]) if has_rows else shape).numel()


def _bytes(state: dict[str, Any]) -> int:
    return sum(_size(value) for value in state.values() if isinstance(value, torch.Tensor))


def _shape_of(parameter: torch.Tensor) -> torch.nn.Parameter:
    shape = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
    shape.grad = torch.empty_like(shape)
    return shape
