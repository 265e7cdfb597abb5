"""Store tensors in 8 bits an element, with one scale for each block of 256.

A row is everything with the same first index, flat, in row-major order; a tensor with one dimension is one row. Each
256 elements of a row are a block, and its last block may be shorter. So ranks can divide and join rows like those of
the parameter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 256
_COARSE, _FINE = 20, 19  # bits of a float32's mantissa below the 3 and 4 bits that codes keep
_LEAST_SCALE = torch.finfo(torch.float32).tiny
# Odd numbers near 2**20 / p and 2**20 / p**2 with p**3 = p + 1: places and steps fill the thresholds evenly.
_BETWEEN_PLACES, _BETWEEN_STEPS = 791547, 597521


@dataclass(frozen=True)
class Code:
    """The numbers that a code stands for: floating point with fewer bits for smaller numbers.

    The code c of a number x is its place in the levels `l(0) = 0 < l(1) < ... < l(greatest)`. With `a = 2**-e` the
    number `x + a` is taken as a float32, whose bits, read as an integer, grow linearly with x between powers of two:
    the upper half of the codes are for its first 4 bits below the leading one, the lower half for the first 3, and far
    below a the levels are evenly spaced. So levels are 1/16 to 1/8 (upper half: 1/32 to 1/16) of their number apart.

    Attributes:
        dtype: `torch.int8` with signs, else `torch.uint8`.
        greatest: the greatest code.
        coarse: codes below which 3 bits are kept.
        exponent: e.
    """

    dtype: torch.dtype
    greatest: int
    coarse: int
    exponent: int

    @property
    def is_signed(self) -> bool:
        """Whether it has negative numbers."""
        return self.dtype == torch.int8

    @property
    def shift(self) -> float:
        """What is added to numbers, a."""
        return 2.0**-self.exponent

    @property
    def shift_bits(self) -> int:
        """The bits of a as a float32."""
        return (127 - self.exponent) << 23

    @property
    def break_bits(self) -> int:
        """The bits, above those of a, from which 4 are kept."""
        return self.coarse << _COARSE

    @property
    def greatest_level(self) -> float:
        """The number that the greatest code stands for."""
        bits = self.shift_bits + self.break_bits + ((self.greatest - self.coarse) << _FINE)
        return (1 + (bits & (2**23 - 1)) / 2**23) * 2.0 ** ((bits >> 23) - 127) - self.shift


SIGNED = Code(torch.int8, greatest=127, coarse=63, exponent=11)
"""127 positive and 127 negative numbers, from 3.3e-5 of the greatest; the upper half is from 1/16 of it."""
UNSIGNED = Code(torch.uint8, greatest=255, coarse=127, exponent=23)
"""255 positive numbers, from 7.9e-9 of the greatest; the upper half is from 1/256 of it."""


def new_codes(like: torch.Tensor, code: Code) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of zeros.

    Args:
        like: gives shape and device.
        code: what codes stand for.

    Returns:
        Codes of the same shape, contiguous, and float32 scales of `scales_shape`: for m rows of n elements
        `m n + 4 m ceil(n / 256)` bytes.
    """
    codes = torch.zeros(like.shape, dtype=code.dtype, device=like.device)
    return codes, torch.zeros(scales_shape(like.shape), dtype=torch.float32, device=like.device)


def scales_shape(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor: `(rows, ceil(n / 256))`, or `(ceil(n / 256),)` of one row alone."""
    if len(shape) < 2:
        return (block_count(shape.numel()),)
    return shape[0], block_count(shape[1:].numel())


def block_count(numel: int) -> int:
    """Return how many blocks a row of so many elements has."""
    return -(-numel // BLOCK)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, code: Code) -> torch.Tensor:
    """Return the numbers that codes stand for, in float32.

    Args:
        codes: contiguous, of any shape.
        scales: those of their blocks, of `scales_shape`.
        code: what codes stand for.
    """
    bits = codes.to(torch.int32).view(-1)
    sign = None
    if code.is_signed:
        sign = bits.bitwise_right_shift(31)  # XLA divides for `>>`, and rounds negative numbers to 0
        bits.bitwise_xor_(sign).sub_(sign)
        sign.mul_(2).add_(1)
    bits.bitwise_left_shift_(_COARSE)
    torch.minimum(bits, (bits + code.break_bits).bitwise_right_shift_(1), out=bits)
    values = bits.add_(code.shift_bits).view(torch.float32).sub_(code.shift)
    if sign is not None:
        values.mul_(sign)
    for blocks, own_scales in _blocks(values, scales):
        blocks.mul_(own_scales.unsqueeze(-1))
    return values.view(codes.shape)


def quantize_(
    codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor, code: Code, step: int | None = None
) -> None:
    """Set codes and scales to those of numbers. Nothing is read back from the device.

    The greatest number of a block is kept but for a rounding of float32. A block with a number that is not finite
    becomes NaN and infinite as a whole.

    Rounding to the nearest would hold a mean that changes by 1/1000 a step where it is for ever. So a number between
    two levels becomes the upper one where its share of the way is above a threshold that changes with place and step,
    each threshold as often as any other (a Weyl sequence): over the steps a number is kept on the average, without
    random numbers, and the same numbers in the same step give the same codes. What is not 0 never becomes 0 in an
    unsigned code: as the second moment of a small first one it would make a great step.

    Args:
        codes: contiguous, of any shape.
        scales: those of their blocks, of `scales_shape`.
        values: of the codes' shape, contiguous float32.
        code: what codes stand for.
        step: number of the step, for the thresholds; None rounds to the nearest level.
    """
    thresholds = _thresholds(step, values.device)
    for (blocks, own_scales), (own_codes, _) in zip(_blocks(values, scales), _blocks(codes, scales), strict=True):
        own_codes.copy_(_codes_of(blocks, own_scales, thresholds[: blocks.shape[-1]], code))


def _codes_of(blocks: torch.Tensor, scales: torch.Tensor, thresholds: torch.Tensor, code: Code) -> torch.Tensor:
    """Return the codes of blocks `(rows, blocks of a row, elements)`, and set their scales."""
    sizes = blocks.abs() if code.is_signed else blocks.clone()
    scales.copy_(sizes.amax(dim=-1).div_(code.greatest_level).clamp_(min=_LEAST_SCALE))
    sizes.div_(scales.unsqueeze(-1))
    bits = (sizes + code.shift).view(torch.int32).sub_(code.shift_bits)
    torch.maximum(bits, (bits * 2).sub_(code.break_bits), out=bits)
    bits.add_(thresholds).bitwise_right_shift_(_COARSE).clamp_(max=code.greatest)
    if code.is_signed:
        sign = blocks.view(torch.int32).bitwise_right_shift(31)
        return bits.bitwise_xor_(sign).sub_(sign)
    return torch.maximum(bits, sizes > 0, out=bits)


def _blocks(tensor: torch.Tensor, scales: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return views `(rows, blocks of a row, elements)` of full blocks and of shorter ones, with their scales."""
    if tensor.numel() == 0:
        return []
    of_rows = scales if scales.dim() > 1 else scales.unsqueeze(0)
    rows = tensor.view(of_rows.shape[0], -1)
    count = rows.shape[1] // BLOCK
    full, rest = rows[:, : count * BLOCK].unflatten(1, (count, BLOCK)), rows[:, count * BLOCK :].unsqueeze(1)
    return [part for part in ((full, of_rows[:, :count]), (rest, of_rows[:, count:])) if part[0].numel()]


def _thresholds(step: int | None, device: torch.device) -> torch.Tensor:
    """Return what is added to bits before those that are not kept are cut off, one number for each place in a block."""
    if step is None:
        return torch.full((BLOCK,), 1 << (_COARSE - 1), dtype=torch.int32, device=device)
    first = step * _BETWEEN_STEPS % (1 << _COARSE)
    last = first + BLOCK * _BETWEEN_PLACES
    # In a program of XLA the step's number would be a constant, and each step a program of its own.
    made_on = torch.device("cpu") if device.type == "xla" else device
    places = torch.arange(first, last, _BETWEEN_PLACES, dtype=torch.int32, device=made_on)
    return places.bitwise_and_((1 << _COARSE) - 1).to(device)
