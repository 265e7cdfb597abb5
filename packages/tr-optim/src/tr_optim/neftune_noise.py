"""Draw the noise of NEFTune: how long each row is, and numbers that depend on a key alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from tr_optim.projection.basis import has_generator, seeded_generator

SEED, RANK, STEP, CALLS = range(4)
"""Places in the counters of a run."""


def draw(
    embedded: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    alpha: float,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Return noise for embedded tokens, uniform within `alpha / sqrt(L * d)`. Nothing is read from the device.

    Args:
        embedded: vectors of d channels, `(B, L, d)` or `(L, d)`.
        mask: positive where there is a token, of the same positions; None for everywhere.
        positions: of each token in its sequence, of the same positions; where they do not grow, another sequence
            begins, with an L of its own. None for one sequence a row.
        alpha: size of the noise.
        generator: of the numbers; None is torch's default one of the device.
    """
    width = embedded.shape[-1]
    if mask is None and positions is None:
        return _uniform(embedded, alpha / math.sqrt(embedded.shape[-2] * width), generator)
    lengths = real_lengths(mask, positions)
    bounds = torch.where(lengths > 0, (lengths * width).rsqrt() * alpha, 0.0)
    return _uniform(embedded, 1.0, generator).mul_(bounds.to(embedded.dtype).view(*embedded.shape[:-1], 1))


def real_lengths(mask: torch.Tensor | None, positions: torch.Tensor | None) -> torch.Tensor:
    """Return for each token the number of tokens in its sequence, in float32, and 0 for padding.

    Args:
        mask: of shape `(..., L)`; see `draw`.
        positions: of the same shape; see `draw`.
    """
    shape = (positions if mask is None else mask).shape  # type: ignore[union-attr]
    length = shape[-1]
    if mask is None:
        real = torch.ones((1, 1), device=positions.device).expand(positions.numel() // length, length)  # type: ignore[union-attr]
    else:
        real = (mask > 0).float().reshape(-1, length)
    if positions is None:
        return (real * real.sum(dim=-1, keepdim=True)).view(shape)
    positions = positions.reshape(-1, length)
    begins = torch.zeros_like(positions)
    begins[:, 1:] = positions[:, 1:] <= positions[:, :-1]
    sequence = begins.cumsum(dim=-1)
    counts = torch.zeros_like(real).scatter_add_(1, sequence, real)
    return (real * counts.gather(1, sequence)).view(shape)


def seeded(key: Sequence[int], device: torch.device) -> torch.Generator:
    """Return a generator whose numbers depend on `key` alone, on the CPU where torch has none for the device."""
    like = torch.empty(0, device=device if has_generator(device.type) else "cpu")
    return seeded_generator(like, ("neftune", *key))


def _uniform(like: torch.Tensor, bound: float, generator: torch.Generator | None) -> torch.Tensor:
    if generator is None or generator.device.type == like.device.type:
        return torch.empty_like(like).uniform_(-bound, bound, generator=generator)
    drawn = torch.empty(like.shape, dtype=like.dtype).uniform_(-bound, bound, generator=generator)
    return drawn.to(like.device)


@torch.library.custom_op("tr_optim::neftune_noise", mutates_args=("counters",))
def compiled_noise(
    embedded: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    alpha: float,
    counters: torch.Tensor,
    counts: bool,
) -> torch.Tensor:
    """Draw in a compiled model: one call that the compiler does not look into, whatever the length.

    Args:
        embedded: as of `draw`.
        mask: as of `draw`.
        positions: as of `draw`.
        alpha: as of `draw`.
        counters: seed, rank, step and calls, on the CPU; empty for torch's default generator. Calls are counted up.
        counts: whether this call counts.
    """
    generator = None
    if counters.numel():
        generator = seeded(counters.tolist(), embedded.device)  # on the CPU: nothing is waited for
        counters[CALLS] += counts
    return draw(embedded, mask, positions, alpha, generator)


@compiled_noise.register_fake
def _(
    embedded: torch.Tensor,
    mask: torch.Tensor | None,
    positions: torch.Tensor | None,
    alpha: float,
    counters: torch.Tensor,
    counts: bool,
) -> torch.Tensor:
    return torch.empty_like(embedded)
