"""Pass a count of targets to a loss, and find out whether the loss was divided by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch.overrides import get_default_nowrap_functions


class ItemCount(torch.Tensor):
    """Mark a count, and every tensor that is calculated with it, by the type of the tensor.

    Moving, copying, printing or comparing a count changes no loss. A metric that is divided by it is not the loss. Only
    a loss that is returned as an `ItemCount` depends on the count. Comparisons return plain tensors. So a loss that a
    comparison selects is not mistaken for a divided one. Python numbers cannot carry a mark: `reads` records those that
    are read from a count.

    Attributes:
        reads: the numbers that were read from counts since it was last cleared; one list for the process.
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
        """Run an operation on plain tensors, and mark its result."""
        if torch.compiler.is_compiling():  # the compiler traces this call without a graph break
            return super().__torch_function__(func, (ItemCount,), args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if result is args[0] if args else False:
                return _mark_in_place(result)
            return result if _only_looks(func) else _mark(result)

    def item(self) -> Any:
        """Read the number."""
        return _record_reads(plain(self).item())

    def tolist(self) -> Any:
        """Read the number, or the numbers."""
        return _record_reads(plain(self).tolist())

    def numpy(self, *, force: bool = False) -> Any:
        """Return the number as an array."""
        return _record_reads(plain(self).numpy(force=force))

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the number as an array."""
        return _record_reads(plain(self).__array__(*args, **kwargs))

    def __int__(self) -> int:
        """Read the number."""
        return _record_reads(int(plain(self)))

    def __float__(self) -> float:
        """Read the number."""
        return _record_reads(float(plain(self)))

    def __index__(self) -> int:
        """Read the number."""
        return _record_reads(plain(self).__index__())

    def __format__(self, format_spec: str) -> str:
        """Format the number as a plain tensor does."""
        return plain(self).__format__(format_spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Return the representation of a plain tensor."""
        return plain(self).__repr__(tensor_contents=tensor_contents)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Copy to a plain tensor, for a user who keeps it."""
        return plain(self).__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save as a plain tensor, for a user who keeps it."""
        return plain(self).__reduce_ex__(protocol)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its mark; its history for the backward pass stays."""
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, ItemCount) else tensor


def _mark(result: Any) -> Any:
    if type(result) is torch.Tensor:
        return result if result.dtype is torch.bool else result.as_subclass(ItemCount)
    return type(result)(map(_mark, result)) if type(result) in (tuple, list) else result


def _mark_in_place(result: Any) -> Any:
    """Mark a loss that was changed in place. A tensor without a gradient may be a user's own sum, and stays plain."""
    if type(result) is torch.Tensor and result.requires_grad:
        result.__class__ = ItemCount
    return result


def _only_looks(func: Callable[..., Any]) -> bool:
    """Whether a function's result depends only on the shape and type of a count, or is what it is a view of.

    Compilers follow views to the tensor that is none, and a marked one is a view.
    """
    name = getattr(func, "__name__", "")
    return name.endswith("_like") or name.startswith("new_") or func in get_default_nowrap_functions()


def _record_reads(value: Any) -> Any:
    if not torch.compiler.is_compiling():
        numbers = value if isinstance(value, list) else [value]
        ItemCount.reads.extend(float(number) for number in numbers if getattr(number, "size", 1) == 1)
    return value


# The operations of a mean over losses. The search for a factor follows these, and stops at the model behind them.
_LINEAR = (
    "Add Alias AsStrided Cat Clone Div Expand Index MaskedFill MaskedSelect Mean Mul Neg Permute ReshapeAlias Rsub "
    "Select Slice Split Squeeze Stack Sub Sum T ToCopy Transpose UnsafeView Unsqueeze View Where"
)
_LINEAR_NODES = frozenset(f"{name}Backward" for name in _LINEAR.split(" "))
_MOST_NODES = 500


def divides_by_any(loss: torch.Tensor, numbers: Sequence[float]) -> bool | None:
    """Whether one of these numbers is a factor or divisor of the loss.

    The search follows the loss back through sums, means, products and quotients. A product or quotient with the number,
    its inverse, or a simple multiple of either is a use of it. A factor with at most three digits is the user's own.
    None if a factor is of neither kind, or if there is no history to follow.
    """
    if loss.grad_fn is None:
        return None
    answers = {_is_made_of(factor, number) for factor in _factors(loss.grad_fn) for number in numbers if number}
    if True in answers:
        return True
    return None if None in answers else False


def _factors(root: Any) -> Iterator[float]:
    """Yield the numbers that a loss was multiplied with or divided by."""
    waiting, seen = [root], {root}
    while waiting and len(seen) < _MOST_NODES:
        node = waiting.pop()
        if node.name().rstrip("0123456789") not in _LINEAR_NODES:
            continue
        names = ("_saved_other", "_saved_self") if node.name().startswith(("Mul", "Div")) else ()
        for value in [getattr(node, name, None) for name in names]:
            if isinstance(value, torch.Tensor) and value.dim() == 0 and _is_number(value):
                yield abs(float(value))  # on the host, like every number from Python
        new = [after for after, _ in node.next_functions if after is not None and after not in seen]
        waiting += new
        seen.update(new)


def _is_number(value: torch.Tensor) -> bool:
    """Whether a scalar came from Python: such a scalar does not determine the type of a result."""
    other = torch.ones((), dtype=torch.float16 if value.is_floating_point() else torch.int32)
    return value.device.type == "cpu" and torch.result_type(value, other) == other.dtype


def _is_made_of(factor: float, count: float) -> bool | None:
    if factor == 0.0 or not math.isfinite(factor):
        return False
    if math.isclose(factor, count, rel_tol=1e-6) or math.isclose(factor * count, 1.0, rel_tol=1e-6):
        return True
    if _is_simple(factor, 1e-12):
        if factor.is_integer():
            return factor > count and (factor / count).is_integer()
        return None if _digits(factor * count) < _digits(factor) else False
    if _is_simple(factor * count, 1e-6) or _is_simple(factor / count, 1e-6):
        return True
    return False if factor.is_integer() else None


def _digits(value: float) -> int:
    return len(f"{value:.6g}".replace(".", "").strip("0"))


def _is_simple(value: float, tolerance: float) -> bool:
    return math.isclose(value, float(f"{value:.3g}"), rel_tol=tolerance)
