"""Hand out a number of targets that leaves its trace in whatever is calculated with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch


class ItemCount(torch.Tensor):
    """A count, and every tensor that was calculated with one: what is left of a loss is asked for its type.

    Moving, copying, printing or comparing a count changes no loss, and a metric that is divided by it is not the loss:
    only a loss that comes back as an `ItemCount` depends on the count. Comparisons give plain tensors, so that a loss
    which is kept or dropped by one is not taken for a divided one. Python numbers cannot carry a trace: those that are
    read of a count are noted in `reads`.

    Attributes:
        reads: the numbers that were read of counts since it was last cleared, one list for the process.
    """

    reads: ClassVar[list[float]] = []

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on plain tensors, and mark what it gives."""
        if torch.compiler.is_compiling():  # the compiler knows this call by itself, and keeps one graph
            return super().__torch_function__(func, (ItemCount,), args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if result is args[0] if args else False:
                return _mark_in_place(result)
            return result if _only_looks(func) else _mark(result)

    def item(self) -> Any:
        """Read the number."""
        return _note(plain(self).item())

    def tolist(self) -> Any:
        """Read the number, or the numbers."""
        return _note(plain(self).tolist())

    def numpy(self, *, force: bool = False) -> Any:
        """Return the number as an array."""
        return _note(plain(self).numpy(force=force))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the number as an array."""
        return _note(plain(self).__array__(*args, **kwargs))

    def __int__(self) -> int:
        """Read the number."""
        return _note(int(plain(self)))

    def __float__(self) -> float:
        """Read the number."""
        return _note(float(plain(self)))

    def __index__(self) -> int:
        """Read the number."""
        return _note(plain(self).__index__())

    def __format__(self, format_spec: str) -> str:
        """Write the number as a plain tensor would."""
        return plain(self).__format__(format_spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Write it as a plain tensor would."""
        return plain(self).__repr__(tensor_contents=tensor_contents)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy what a user keeps as a plain tensor."""
        return plain(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save what a user keeps as a plain tensor."""
        return plain(self).__reduce_ex__(protocol)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its mark; its history for the backward pass stays."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, ItemCount) else tensor


def _mark(result: Any) -> Any:
    if type(result) is torch.Tensor:
        return result if result.dtype is torch.bool else result.as_subclass(ItemCount)
    return type(result)(map(_mark, result)) if type(result) in (tuple, list) else result


def _mark_in_place(result: Any) -> Any:
    """Mark a loss that was changed in place; a tensor without a gradient may be a user's own sum, which stays plain."""
    if type(result) is torch.Tensor and result.requires_grad:
        result.__class__ = ItemCount
    return result


def _only_looks(func: Callable[..., Any]) -> bool:
    """Whether what a function gives depends on the shape and type of a count only."""
    name = getattr(func, "__name__", "")
    return name.endswith("_like") or name.startswith("new_")


def _note(value: Any) -> Any:
    if not torch.compiler.is_compiling():
        numbers = value if isinstance(value, list) else [value]
        ItemCount.reads.extend(float(number) for number in numbers if getattr(number, "size", 1) == 1)
    return value
