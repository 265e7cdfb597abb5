"""Measure, clip and leave out what DeepSpeed is about to apply."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def clip_gradients(engine: Any, stage: int, max_norm: float | None) -> torch.Tensor:
    """Return the norm of the gradients that the engine holds, and have its step clip them to `max_norm`. Collective.

    DeepSpeed clips as it steps, by the norm that it measures again then.
    """
    if stage == 0:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(engine.module.parameters(), max_norm, norm)
        return norm
    zero = engine.optimizer
    zero.clip_grad = 0.0 if max_norm is None else float(max_norm)
    if stage == 3:
        combine = importlib.import_module("deepspeed.runtime.utils").combine_grad_norm_groups
        norm = combine(zero._get_norm_groups())
    else:
        norm = zero.scaled_global_norm()
    return norm / zero.loss_scale


def leave_out_step(engine: Any, stage: int) -> None:
    """Forget the gradients that the engine holds, as it does itself where their norm is not finite."""
    if stage == 0:
        engine.zero_grad()
        return
    with _invalid_norm(engine.optimizer, stage):
        engine.step()


@contextmanager
def _invalid_norm(zero: Any, stage: int) -> Iterator[None]:
    infinity = torch.full((), torch.inf, device=zero.device)
    replaced = (
        {"_get_norm_groups": lambda: [infinity]}
        if stage == 3
        else {"scaled_global_norm": lambda: infinity, "check_grad_overflow": True}
    )
    before = {name: vars(zero)[name] for name in replaced if name in vars(zero)}
    vars(zero).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(zero)[name]
        vars(zero).update(before)
