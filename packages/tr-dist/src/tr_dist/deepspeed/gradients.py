"""Measure, clip and leave out what DeepSpeed is about to apply."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
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
    hand_over_early_gradients(zero)
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


def hand_over_early_gradients(zero: Any) -> None:
    """Give an offloaded optimizer the gradients that came before a step's last micro-batch alone.

    DeepSpeed copies the sums of those that the last one added to, and leaves out the others.
    """
    if getattr(zero, "offload_optimizer", False):  # at stage 3
        numbers = {each.ds_id: zero.get_param_id(each) for group in zero.fp16_groups for each in group}
        _copy_left_out(zero, "_offload_boundary_param_ids", zero._finalize_offload_gradient_accumulation, numbers)
    elif getattr(zero, "cpu_offload", False):
        numbers = {number: number for number in zero._offload_accumulated_param_ids}
        _copy_left_out(
            zero, "_offload_accumulated_param_ids", zero._finalize_cpu_offload_gradient_accumulation, numbers
        )


def forget_gradients(zero: Any) -> None:
    """Put zeros for the gradients of a step that was made, where DeepSpeed keeps them for the next.

    Only the first micro-batch of a step overwrites them. A parameter without a part in it would keep what it had in the
    step before, or add to it.
    """
    kept = [getattr(zero, "grad_partitions_flat_buffer", None)]  # at stage 3
    if getattr(zero, "cpu_offload", False):
        kept += [*zero.accumulated_grads_in_cpu.values(), *(flat.grad for flat in zero.single_partition_of_fp32_groups)]
    for gradients in kept:
        if gradients is not None:
            gradients.zero_()


def _copy_left_out(zero: Any, with_gradient: str, copy: Callable[[], None], numbers: dict[int, int]) -> None:
    """Copy the sums of gradients that this step has, and that were not copied yet."""
    before = getattr(zero, with_gradient)
    setattr(zero, with_gradient, {each for each in before if numbers[each] not in zero.norm_for_param_grads})
    try:
        copy()
    finally:
        setattr(zero, with_gradient, before)


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
