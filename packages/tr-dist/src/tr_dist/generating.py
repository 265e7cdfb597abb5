"""Have ranks that share one model's weights make as many forwards as each other, where it generates its own way."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn


def generate_together(model: nn.Module, total: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """Have a model's `generate` repeat its last forward, once it is done, for as long as other ranks make forwards.

    It is put into its place on the model, and is a collective call then. Nothing is done to a model without one, and to
    one that goes on by itself, as those of transformers do with `synced_gpus`, or has such a model inside.

    Args:
        model: what generates, by calls of itself.
        total: sums a tensor over the ranks.
        device: where such tensors are.
    """
    generate = getattr(model, "generate", None)
    if not callable(generate) or any(_goes_on(module) for module in model.modules()):
        return
    one, none = torch.ones((), device=device), torch.zeros((), device=device)

    @functools.wraps(generate)
    def together(*inputs: Any, **options: Any) -> Any:
        last: list[tuple[Any, Any]] = []

        def before_forward(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
            last[:] = [(inputs, options)]
            total(one)

        # First of all hooks: others gather weights, which ranks that are done do once they know that one goes on.
        handle = model.register_forward_pre_hook(before_forward, with_kwargs=True, prepend=True)
        try:
            generated = generate(*inputs, **options)
        finally:
            handle.remove()
        while total(none) > 0:  # sync: generating reads tokens anyway
            if not last:
                raise RuntimeError(
                    f"{generate.__qualname__} made no forward on this rank, and others need its shards of the weights "
                    "for theirs; have it call the model on all ranks, or on none"
                )
            model(*last[0][0], **last[0][1])
        return generated

    cast("Any", together).goes_on = True
    cast("Any", model).generate = together


def _goes_on(module: nn.Module) -> bool:
    generate = getattr(module, "generate", None)
    if not callable(generate):
        return False
    return getattr(generate, "goes_on", False) or "synced_gpus" in inspect.signature(generate).parameters
