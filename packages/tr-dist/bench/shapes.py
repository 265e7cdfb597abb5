"""Run steps over shapes without numbers, and note what they exchange."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Of an operator's arguments the one that has as many elements as travel to or from a rank: (kind, which).
_EXCHANGES = {
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "allreduce_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all-gather", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "all_gather_into_tensor": ("all-gather", None),
    "all_reduce": ("all-reduce", 0),
}


class Exchanges(TorchDispatchMode):
    """Counts collectives and their bytes, of the whole tensor: gathered, to be scattered, or reduced.

    Attributes:
        counts: how often, by kind.
        bytes: how many, by kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._schema.name.partition("::")[2]
            if name not in _EXCHANGES:
                raise NotImplementedError(f"{func}: what it exchanges is not known here")
            kind, which = _EXCHANGES[name]
            self.counts[kind] += 1
            self.bytes[kind] += nbytes(tree_leaves(args[which]))
        return func(*args, **(kwargs or {}))


class NumbersOfSteps(TorchDispatchMode):
    """Leaves single numbers on the CPU, such as an optimizer's count of steps, real, for they are read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if tensors:
            is_number = all(type(t) is torch.Tensor and t.dim() == 0 and t.device.type == "cpu" for t in tensors)
        else:
            shape = args[0] if args else None
            is_number = isinstance(shape, list | tuple) and not shape and kwargs.get("dtype") is torch.float64
        if not is_number:
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


@contextmanager
def without_numbers(are_real: bool = False) -> Iterator[None]:
    """Have tensors that are made here have shapes only; with `are_real` do nothing."""
    with ExitStack() as stack:
        if not are_real:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(NumbersOfSteps())
        yield


def local(tensor: Any) -> torch.Tensor:
    """Return this rank's part."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def nbytes(tensors: Any) -> int:
    """Return the bytes of this rank's parts of all tensors among some values."""
    return sum(local(t).numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
