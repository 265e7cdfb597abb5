"""Estimate how long the run takes, and whether its weights and states fit into the device's memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject
from tr_log.wording import size


def check_memory(subject: Subject) -> Iterator[Problem]:
    """Compare parameters, gradients and optimizer state with the whole memory of an accelerator."""
    figures = subject.figures
    device = subject.trainer.strategy.device
    if device.type == "cpu" or "optimizer_bytes" not in figures:
        return
    module = torch.get_device_module(device)
    if hasattr(module, "mem_get_info"):
        yield from memory_problems(figures, module.mem_get_info(device)[1])


def memory_problems(figures: dict[str, int], total_bytes: int) -> Iterator[Problem]:
    """Find a model that does not fit, whatever the batch size.

    Args:
        figures: has `parameter_bytes`, `gradient_bytes` and `optimizer_bytes`.
        total_bytes: the device's memory.
    """
    needed = figures["parameter_bytes"] + figures["gradient_bytes"] + figures["optimizer_bytes"]
    if needed > total_bytes:
        yield Problem(
            "T306",
            f"parameters, gradients and optimizer state take {size(needed)}, the device has {size(total_bytes)}; "
            "freeze more of the model, choose an optimizer with a smaller state, or divide it over devices",
        )


def estimate(subject: Subject) -> Iterator[Problem]:
    """Reckon the time from the one forward and backward; an upper bound where larger batches are more efficient."""
    figures = subject.figures
    if "forward_backward_s" in figures and figures.get("steps") and figures.get("trial_samples"):
        per_sample_s = figures["forward_backward_s"] / figures["trial_samples"]
        per_rank = figures["samples_per_step"] / figures["world_size"]
        figures["estimated_s"] = per_sample_s * per_rank * figures["steps"]
    yield from ()
