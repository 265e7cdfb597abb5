"""Decide whether the steps of a run can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tr_args.fields.hardware import PrecisionFields
from tr_core.optim.fused_backward import kind
from tr_core.protocols import Strategy
from tr_core.single_device import SingleDevice

_OVERRIDES = (
    "training_step",
    "compute_loss",
    "call_model",
    "_prepare_inputs",
    "_prepare_input",
    "_prepare_context_parallel_inputs",
    "_split_labels",
    "compute_loss_context_manager",
    "autocast_smart_context_manager",
)


def why_not_captured(
    args: PrecisionFields, strategy: Strategy, model: nn.Module, overrides: Callable[..., bool], optimizer: Any = None
) -> str | None:
    """Return why no step of a run can be captured; None if nothing is known that prevents it."""
    switches = ("torch_compile", "activation_checkpointing", "auto_find_batch_size", "fp16")
    found = [name for name in _OVERRIDES if overrides(name)]
    checks = (
        (
            optimizer is None or kind(optimizer) == "step",
            f"{type(optimizer).__name__} uses gradients during the backward pass",
        ),
        (type(strategy) is SingleDevice, f"only one process on one device is captured, not {type(strategy).__name__}"),
        (strategy.device.type in ("cpu", "cuda"), f"the device {strategy.device} has no captured steps"),
        *((not getattr(args, name), f"{name}=True needs the ordinary step") for name in switches),
        (not found, f"the Trainer overrides {', '.join(found)}, whose Python code must run in every step"),
        (model._compiled_call_impl is None, "the model's calls are compiled already"),
    )
    return next((reason for holds, reason in checks if not holds), None)


def check_step_compile(
    args: PrecisionFields, strategy: Strategy, model: nn.Module, overrides: Callable[..., bool]
) -> None:
    """Raise `ValueError` if `step_compile` is `graph`, and steps cannot be captured."""
    if args.step_compile == "graph" and (reason := why_not_captured(args, strategy, model, overrides)) is not None:
        raise ValueError(refused(reason))


def refused(reason: str) -> str:
    """Return the message for `step_compile='graph'` where a step cannot be captured."""
    return (
        f"step_compile='graph' cannot capture the step: {reason}; change that, or set step_compile='auto', which "
        "trains by ordinary steps where it must"
    )
