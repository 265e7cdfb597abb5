"""Refuse what optimizers that update in the backward pass cannot do, and read their training arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from tr_optim.options import Converter, flag, optional_number, read_options, word

_ACCUMULATE = ("refuse", "store")
_NONFINITE = ("skip_tensor", "skip_step")


def check_settings(
    clip_grad_norm: float | None, clip_grad_value: float | None, accumulate: str, nonfinite: str | None
) -> None:
    """Check the settings that all of these optimizers share.

    Raises:
        ValueError: a value is out of range or not known, or two contradict each other.
    """
    for name, value in (("clip_grad_norm", clip_grad_norm), ("clip_grad_value", clip_grad_value)):
        if value is not None and value <= 0:
            raise ValueError(f"{name}={value:g} must be positive, or None for no clipping")
    if clip_grad_norm is not None and clip_grad_value is not None:
        raise ValueError(
            f"clip_grad_norm={clip_grad_norm:g} and clip_grad_value={clip_grad_value:g} are both set; give one"
        )
    for name, value, known in (("accumulate", accumulate, _ACCUMULATE), ("nonfinite", nonfinite, _NONFINITE)):
        if value is not None and value not in known:
            raise ValueError(f"{name}={value!r} is not known; choose {' or '.join(known)}")


def check_dense_and_real(gradient: torch.Tensor, name: str) -> None:
    """Check that a gradient is dense and real.

    Raises:
        RuntimeError: it is not.
    """
    if gradient.is_sparse or gradient.is_complex():
        kind = "sparse" if gradient.is_sparse else "complex"
        raise RuntimeError(
            f"{name} has a {kind} gradient of shape {tuple(gradient.shape)}; it needs dense real ones "
            "(for nn.Embedding: sparse=False)"
        )


def no_accumulation(name: str, ordinary: str) -> str:
    """Return why several micro-batches in a step are refused, and what to do instead.

    Args:
        name: the optimizer.
        ordinary: one that does the same with ordinary gradients.
    """
    return (
        f"{name} applies and frees each gradient during the backward pass, so that micro-batches cannot add up. Use "
        "gradient_accumulation_steps=1 with a larger per_device_train_batch_size and gradient_checkpointing=True; or "
        "an optimizer whose gradients add up in little memory, as galore_adamw_layerwise; or "
        f"{ordinary}, which does the same with ordinary gradients; or accumulate='store' "
        "(optim_args='accumulate=store'), which adds gradients up in as much memory as those take"
    )


def refuse_unknown_ranks(name: str) -> None:
    """Raise if there are several ranks, for an optimizer without `bind`.

    Raises:
        RuntimeError: there are.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"{dist.get_world_size()} ranks train together, and {name} would apply the gradients of each rank alone; "
            "call optimizer.bind(strategy) first, with what knows the ranks, as tr_dist.DDP() does"
        )


def fused_options(args: Any, owner: str, ordinary: str, takes: Mapping[str, Converter]) -> dict[str, Any]:
    """Return the options of an optimizer that updates during the backward pass.

    `max_grad_norm` sets the clipping; `on_nonfinite="skip"` leaves out steps that are not finite.

    Args:
        args: training arguments.
        owner: the optimizer's name, for messages.
        ordinary: the name of one that does the same with ordinary gradients, for messages.
        takes: what it takes in `optim_args` beside clip_grad_value, accumulate, nonfinite and stochastic_rounding.

    Raises:
        ValueError: `optim_args` has an unknown option, or an argument is not supported.
    """
    own = {"clip_grad_value": optional_number, "accumulate": word, "nonfinite": word, "stochastic_rounding": flag}
    options = read_options(args.optim_args, {**own, **takes}, owner)
    if args.gradient_accumulation_steps > 1 and options.get("accumulate", "refuse") == "refuse":
        steps = f"optim={owner!r} with gradient_accumulation_steps={args.gradient_accumulation_steps}: "
        raise ValueError(steps + no_accumulation(owner, ordinary))
    max_norm = args.max_grad_norm or None
    if max_norm is not None and options.get("clip_grad_value") is not None:
        raise ValueError(
            f"max_grad_norm={max_norm:g} and clip_grad_value={options['clip_grad_value']:g} (optim_args) both clip; "
            "set max_grad_norm=0 to clip by value"
        )
    if args.on_nonfinite == "skip":
        options.setdefault("nonfinite", "skip_step")
    if options.get("stochastic_rounding"):
        options["seed"] = args.seed
    return {**options, "clip_grad_norm": max_norm}
