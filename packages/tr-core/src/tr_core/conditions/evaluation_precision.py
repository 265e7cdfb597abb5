"""Turn a whole model to a lower precision for a block, and give it its own weights back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn


@contextmanager
def in_precision(model: nn.Module, dtype: torch.dtype, label_names: Sequence[str] = ()) -> Iterator[None]:
    """Have a model compute in `dtype` throughout within the block: weights, buffers and floating-point inputs.

    Afterwards the weights are bit for bit what they were. Meanwhile an accelerator holds only the cast ones: the
    originals wait in host memory. On a CPU both are held.

    Args:
        model: the unwrapped model; it is the same module with the same parameters in and after the block.
        dtype: a floating-point type.
        label_names: inputs that stay as they are, for the loss.
    """
    handle = model.register_forward_pre_hook(_caster(dtype, frozenset(label_names)), with_kwargs=True)
    originals: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor, original in _parked(model, dtype):
            originals.append((tensor, original))
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        handle.remove()
        for tensor, original in originals:
            tensor.data = original.to(tensor.device)


def _parked(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each tensor that is to be cast, one at a time, with a copy of it in host memory."""
    tensors = [t for t in chain(model.parameters(), model.buffers()) if t.is_floating_point() and t.dtype != dtype]
    sharers = Counter(_storage(tensor) for tensor in tensors)
    for tensor in tensors:
        # Tensors that share memory would not do so any more, once they had been away.
        is_alone = sharers[_storage(tensor)] == 1
        yield tensor, tensor.data.to("cpu") if is_alone else tensor.data


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _caster(dtype: torch.dtype, kept: frozenset[str]) -> Any:
    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {name: value if name in kept else cast(value) for name, value in kwargs.items()}
        return tuple(map(cast, args)), named

    return cast_inputs
