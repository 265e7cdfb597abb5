"""Stop at the first module whose weights or outputs are not finite.

The error lists the modules that ran before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_MODULES_SHOWN = 21


@contextmanager
def overflow_watch(model: nn.Module) -> Iterator[None]:
    """Check every module of a model after each of its forward passes, within the block.

    For debugging. Sync: several times for every module.

    Raises:
        FloatingPointError: a weight or an output is infinite or NaN, in a forward. The message lists the modules that
            ran last, with the extreme absolute values of weights, inputs and outputs.
    """
    seen: deque[str] = deque(maxlen=_MODULES_SHOWN)
    names = {module: name for name, module in model.named_modules()}

    def look(module: nn.Module, given: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        name = names[module] or "(the model)"
        weights = dict(module.named_parameters(recurse=False))
        found = [
            *_describe("weight", weights),
            *_describe("input", {**dict(enumerate(given)), **kwargs}),
            *_describe("output", output),
        ]
        seen.append("\n".join([f"{name}: {type(module).__name__}", *(line for line, *_ in found)]))
        broken = [label for _, label, is_finite in found if not is_finite and not label.startswith("input")]
        if broken:
            raise FloatingPointError(
                f"{' and '.join(broken)} of {name} ({type(module).__name__}) not finite. The modules that ran last, "
                "with the least and the greatest absolute value:\n\n" + "\n".join(seen)
            )

    handles = [module.register_forward_hook(look, with_kwargs=True) for module in model.modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _describe(label: str, value: Any) -> list[tuple[str, str, bool]]:
    """Return a line, the name, and whether all is finite, for each floating-point tensor in `value`."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or not value.numel():
            return []
        least, greatest = torch.stack(value.detach().abs().aminmax()).tolist()  # sync: debugging
        is_finite = greatest < float("inf")  # neither infinite nor NaN
        return [(f"  {least:9.2e} {greatest:9.2e} {label}", label, is_finite)]
    if hasattr(value, "__dataclass_fields__") and not isinstance(value, Mapping):
        value = vars(value)
    if isinstance(value, Mapping):
        return [found for key, item in value.items() for found in _describe(f"{label} {key}", item)]
    if isinstance(value, list | tuple):
        return [found for number, item in enumerate(value) for found in _describe(f"{label} {number}", item)]
    return []
