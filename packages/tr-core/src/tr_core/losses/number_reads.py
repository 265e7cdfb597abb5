"""Find out whether a loss was divided by a number that was read of the count, which leaves no trace of its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

# What a mean over losses is made of: through these a factor is looked for, and not within the model behind them.
_LINEAR = (
    "Add Alias AsStrided Cat Clone Div Expand Index MaskedFill MaskedSelect Mean Mul Neg Permute ReshapeAlias Rsub "
    "Select Slice Split Squeeze Stack Sub Sum T ToCopy Transpose UnsafeView Unsqueeze View Where"
)
_LINEAR_NODES = frozenset(f"{name}Backward" for name in _LINEAR.split(" "))
_MOST_NODES = 500


def divides_by_any(loss: torch.Tensor, numbers: Sequence[float]) -> bool | None:
    """Whether one of these numbers is a factor or divisor of the loss.

    The loss is followed back through sums, means, products and quotients. A product or quotient with the number, its
    inverse, or a simple multiple of either is a use of it. A factor that can be written with three digits is the
    user's own.

    Args:
        loss: a scalar with its history for the backward pass.
        numbers: what was read of the count.

    Returns:
        True or False; None where there is a factor of neither kind, or no history to follow.
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
                yield abs(float(value))  # on the host, as every number is that Python gave
        new = [after for after, _ in node.next_functions if after is not None and after not in seen]
        waiting += new
        seen.update(new)


def _is_number(value: torch.Tensor) -> bool:
    """Whether a scalar came from Python: such a one does not decide the type of a result."""
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
