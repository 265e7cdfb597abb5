"""Norms of gradients, and what they are clipped by."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tr_optim.engine.chunks import computing_dtype


def norm_of(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's norm, in float32 at least: a float16 holds none above 65504."""
    dtype = computing_dtype(gradient)
    # Naming the dtype that a tensor has costs as much as a small norm.
    return torch.linalg.vector_norm(gradient, **({} if dtype == gradient.dtype else {"dtype": dtype}))


def total_norm(norms: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the norm of all parts whose norms are given, as `torch.nn.utils.clip_grad_norm_` adds them up."""
    stacked = [norm.to(device) for norm in norms]
    return torch.linalg.vector_norm(torch.stack(stacked)) if stacked else torch.zeros((), device=device)


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return what gradients of a norm are multiplied by so that it is at most `max_norm`."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
