"""Reckon, before anything is trained, how many bytes gradients and states will take."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tr_optim.engine.chunks import computing_dtype
from tr_optim.engine.settings import Engine, Place
from tr_optim.projection.basis import projected_shape

Placed = Sequence[tuple[torch.Tensor, Place]]


def gradient_bytes(placed: Placed, engine: Engine, micro_batches: int, *, needs_whole: bool) -> int:
    """Return the bytes of gradients, and of what is kept of them, that are there at once in the step with the most.

    Between backward passes and step that is what the mode keeps; to it come the two largest gradients that are consumed
    in backward, for the next one may be computed before one is freed, and a copy of one where they are computed with in
    a higher precision. In a first step of several micro-batches all matrices find a basis, from their whole sums.

    Args:
        placed: parameters with their places.
        engine: how gradients are projected.
        micro_batches: backward passes of a step.
        needs_whole: whether updates are made of whole gradients too.
    """
    trainable = [(p, place) for p, place in placed if p.requires_grad]
    if engine.mode == "step":
        return sum(p.numel() * p.element_size() for p, _ in trainable)
    applies, total, sizes, copied = engine.mode == "immediate", 0, [0], [0]
    for parameter, place in trainable:
        size, dtype = parameter.numel() * parameter.element_size(), computing_dtype(parameter)
        if not (applies or place.is_projected):
            total += size
            continue
        sizes.append(size)
        copied.append(parameter.numel() * dtype.itemsize if dtype != parameter.dtype else 0)
        sums_whole = needs_whole or not place.is_projected or engine.refresh_from == "all"
        if micro_batches > 1 and sums_whole:
            total += parameter.numel() * dtype.itemsize
        elif micro_batches > 1 or not applies:
            group = place.group
            shape = projected_shape(parameter.shape, group["rank"], group["proj_type"])
            total += torch.Size(shape).numel() * dtype.itemsize
    return total + sum(sorted(sizes)[-2:]) + max(copied)


def state_bytes(optimizer: Any, step: Callable[[Any], Any]) -> int:
    """Return the bytes of an optimizer's state after its first step; or, where it has one, of the one that it has.

    A copy of it makes a step over parameters that have a shape and no numbers, one of each shape in a group.

    Args:
        optimizer: can be copied without its state.
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
                shape = shapes.setdefault((parameter.shape, parameter.dtype), _shape_of(parameter))
                counts[shape] += 1
        twin.param_groups.append({**group, "params": list(shapes.values())})
    step(twin)
    return sum(counts[shape] * _bytes(state) for shape, state in twin.state.items())


def _bytes(state: dict[str, Any]) -> int:
    return sum(value.numel() * value.element_size() for value in state.values() if isinstance(value, torch.Tensor))


def _shape_of(parameter: torch.Tensor) -> torch.nn.Parameter:
    shape = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
    shape.grad = torch.empty_like(shape)
    return shape
