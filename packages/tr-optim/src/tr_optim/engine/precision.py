"""Compute with large tensors in pieces, in a precision high enough for sums, and store weights in a lower one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from tr_optim.engine.shards import local_part, shards_of
from tr_optim.moments.blockwise_int8 import BLOCK
from tr_optim.projection.basis import seeded_generator

_ON_CPU, _ON_ACCELERATOR = 2**19, 2**23  # the latter keeps a device busy for longer than a kernel takes to start
_LOW_PRECISION = (torch.float16, torch.bfloat16)


def computing_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute with a tensor in."""
    return torch.float32 if tensor.dtype in _LOW_PRECISION else tensor.dtype


def piece_size(tensor: torch.Tensor) -> int:
    """Return the number of elements to compute with at a time, so that work space does not grow with the tensor."""
    return _ON_CPU if tensor.device.type == "cpu" else _ON_ACCELERATOR


def chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield tensors of one shape piece by piece, as views, or whole if their layout has no such views.

    A piece has some rows, or a flat part of a row that is too large. The tensors may include scales, one for each block
    of 256 elements of a row (see `tr_optim.moments.blockwise_int8`); parts begin and end with a block.
    """
    size, count = piece_size(tensors[0]), tensors[0].numel()
    if count <= size or not all(tensor.is_contiguous() for tensor in tensors):
        yield tensors
        return
    rows = len(tensors[0]) if tensors[0].dim() > 1 else 1
    length, views = count // rows, [tensor.view(rows, -1) for tensor in tensors]
    if length <= size:
        yield from zip(*(view.split(size // length) for view in views), strict=True)
        return
    sizes = [size if view.shape[1] == length else size // BLOCK for view in views]
    for row in range(rows):
        yield from zip(*(view[row].split(n) for view, n in zip(views, sizes, strict=True)), strict=True)


# Bits of a float32's mantissa that the lower precision has no room for.
_BITS_LEFT_OUT = {torch.bfloat16: 16, torch.float16: 13}
_NOISE_BITS = 24  # as many as a float32 has significant ones
# Below its smallest normal number float16 has the same distance between all numbers; bfloat16's range is float32's.
_SMALLEST_NORMAL, _SMALLEST = 2.0**-14, 2.0**-24


class Rounding:
    """Round stochastically: up or down, each with the probability that makes the expected value exact.

    bfloat16 has 8 significant bits. Rounded to nearest, a weight never changes if each update is less than about 2^-9
    of it. Rounded stochastically, such updates change the weight seldom, but by more: over many steps nothing is lost.
    Numbers that the lower precision can represent stay as they are.

    The random numbers depend only on the seed, the parameter's number and the step. So they are the same on all ranks,
    whose replicas stay equal, and after a resume. torch's own generators are not used.

    Source: Gupta et al., "Deep learning with limited numerical precision" (2015), section 3; for bfloat16 weights as in
    Zamirai et al., "Revisiting BFloat16 training" (2020), section 4, without the remainder that they keep too.

    Args:
        seed: of the random numbers; None rounds to nearest.
    """

    def __init__(self, seed: int | None) -> None:
        self._seed = seed

    def generator(self, parameter: torch.Tensor, *place: int | torch.Tensor) -> torch.Generator | None:
        """Return the generator for a parameter in one step; None if it is rounded to nearest, or not at all.

        Args:
            parameter: the parameter to round, or this rank's rows of it; other rows draw other numbers.
            place: its number and the step's, on the CPU. With the seed, they determine the random numbers.
        """
        if self._seed is None or parameter.dtype not in _BITS_LEFT_OUT or parameter.is_meta:
            return None
        shards = shards_of(parameter)
        rows = () if shards is None else (shards.start,)
        return seeded_generator(local_part(parameter), ("rounding", self._seed, *map(int, place), *rows))


class CountedRounding(Rounding):
    """Round stochastically for an optimizer whose state does not count its steps on the host.

    They are counted in its groups, as `rounded_steps`, which its `state_dict` has.

    Args:
        optimizer: the optimizer.
        seed: of the random numbers; None rounds to nearest.

    Raises:
        ValueError: no parameter is of low precision.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, seed: int | None) -> None:
        super().__init__(seed)
        self._numbers: dict[int, int] = {}
        if seed is not None:
            check_has_low_precision(_parameters(optimizer), type(optimizer).__name__)
            optimizer.register_step_post_hook(_count_step)

    def generator_of(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, group: dict[str, Any]
    ) -> torch.Generator | None:
        """Return the generator for a parameter, or this rank's rows of one, in the current step."""
        if self._seed is None:
            return None
        if id(parameter) not in self._numbers:
            self._numbers = {id(p): number for number, p in enumerate(_parameters(optimizer))}
        shards = shards_of(parameter)
        first_row = 0 if shards is None else shards.start
        place = self._numbers[id(parameter)], group.get("rounded_steps", 0), first_row
        return self.generator(local_part(parameter), *place)


def store_rounded(parameter: torch.Tensor, values: torch.Tensor, generator: torch.Generator | None) -> None:
    """Store values in a tensor of lower precision.

    Args:
        parameter: the tensor of lower precision.
        values: of its shape; they are changed.
        generator: draws numbers for stochastic rounding; None rounds to nearest.
    """
    if generator is None:
        parameter.copy_(values)
        return
    for target, piece in chunks(parameter, values):
        target.copy_(round_stochastically(piece, parameter.dtype, generator))


def round_stochastically(values: torch.Tensor, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Return float32 values rounded to those of a dtype, in float32; values that are not finite stay.

    Args:
        values: float32.
        dtype: bfloat16 or float16.
        generator: draws one number of 32 bits for each value.
    """
    left_out = _BITS_LEFT_OUT[dtype]
    noise = torch.randint(
        0, 1 << _NOISE_BITS, values.shape, dtype=torch.int32, device=values.device, generator=generator
    )
    small = _on_grid(values, noise / (1 << _NOISE_BITS)) if dtype == torch.float16 else None
    noise.bitwise_and_((1 << left_out) - 1)
    # Floats of one sign are ordered like their bits, so a carry of the noise gives the next number away from zero.
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-1 << left_out).view(torch.float32)
    if small is not None:
        rounded = torch.where(values.abs() < _SMALLEST_NORMAL, small, rounded)
    return torch.where(values.isfinite(), rounded, values)


def check_has_low_precision(parameters: Iterable[torch.Tensor], owner: str) -> None:
    """Raise if stochastic rounding was requested and there is nothing to round.

    Raises:
        ValueError: no parameter is bfloat16 or float16.
    """
    dtypes: Sequence[torch.dtype] = [parameter.dtype for parameter in parameters]
    if not any(dtype in _BITS_LEFT_OUT for dtype in dtypes):
        found = ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
        raise ValueError(
            f"{owner}: stochastic_rounding=True, but the weights are {found}, and only those in bfloat16 or float16 "
            "lose small updates; load the model in bfloat16, or leave stochastic_rounding out"
        )


def _on_grid(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    steps = values.abs() / _SMALLEST
    below = steps.floor()
    return (below + (noise < steps - below)).mul_(_SMALLEST).copysign(values)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _count_step(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    for group in optimizer.param_groups:
        group["rounded_steps"] = group.get("rounded_steps", 0) + 1
