"""Read what training arguments say about optimizers that update during the backward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tr_optim.engine.fused_checks import refuse_accumulation
from tr_optim.options import Converter, flag, optional_number, read_options


def fused_options(args: Any, owner: str, ordinary: str, takes: Mapping[str, Converter]) -> dict[str, Any]:
    """Return the options of an optimizer that updates during the backward pass.

    Clipping is that of `max_grad_norm`; `on_nonfinite="skip"` leaves out steps that are not finite.

    Args:
        args: training arguments.
        owner: the optimizer's name, for messages.
        ordinary: the name of one that does the same with ordinary gradients, for messages.
        takes: what it takes in `optim_args` beside clip_grad_value, accumulate, nonfinite and stochastic_rounding.

    Raises:
        ValueError: `optim_args` has what it does not take, or the arguments ask for what it cannot do.
    """
    own = {"clip_grad_value": optional_number, "accumulate": str, "nonfinite": str, "stochastic_rounding": flag}
    options = read_options(args.optim_args, {**own, **takes}, owner)
    if args.gradient_accumulation_steps > 1 and options.get("accumulate", "refuse") == "refuse":
        steps = f"optim={owner!r} with gradient_accumulation_steps={args.gradient_accumulation_steps}: "
        raise ValueError(steps + refuse_accumulation(owner, ordinary))
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
