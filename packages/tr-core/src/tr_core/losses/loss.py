"""Decide in one place what a loss is divided by.

A step's loss is the mean over what its micro-batches hold, in one of two ways:

- *Counted*: the model, or `compute_loss_func`, divides a summed loss by `num_items_in_batch`, the number of targets in
  the whole step over all ranks. Such a loss is already a share of the step's mean; the strategy averages gradients
  over ranks, so it is multiplied by their number.
- *Mean*: the loss is a mean over its own micro-batch; it is divided by the number of micro-batches that the step
  really has, and weighted where ranks hold unequal shares of a short one.

Which of the two it is, is not guessed from a signature: the count is handed over as a tensor that notices whether it
takes part in any arithmetic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tr_core.data.order import MicroBatch
from tr_core.protocols import Strategy

IGNORED_TARGET = -100


class ItemCount(torch.Tensor):
    """A scalar tensor that remembers whether it was calculated with; moving it or looking at its shape is no use."""

    uses: list[str]

    @staticmethod
    def of(count: torch.Tensor, uses: list[str] | None = None) -> ItemCount:
        """Wrap a count; the names of the operations that use it are appended to `uses`."""
        wrapped = count.as_subclass(ItemCount)
        wrapped.uses = [] if uses is None else uses
        return wrapped

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run every operation on plain tensors, and note those that calculate."""
        counts = [value for value in args if isinstance(value, ItemCount)]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in _LOOKS:
            return ItemCount.of(result, counts[0].uses) if counts and isinstance(result, torch.Tensor) else result
        for count in counts:
            count.uses.append(getattr(func, "__name__", str(func)))
        return result.as_subclass(torch.Tensor) if isinstance(result, ItemCount) else result


_LOOKS = frozenset(
    {
        torch.is_floating_point,  # asked by what casts the arguments of a forward, such as fully_shard's hooks
        torch.is_complex,
        torch.Tensor.is_complex,
        torch.Tensor.get_device,
        torch.Tensor.record_stream,
        torch.Tensor.to,
        torch.Tensor.cuda,
        torch.Tensor.cpu,
        torch.Tensor.detach,
        torch.Tensor.dim,
        torch.Tensor.size,
        torch.Tensor.numel,
        torch.Tensor.__repr__,
        torch.Tensor.is_floating_point,
        torch.Tensor.device.__get__,  # type: ignore[attr-defined]
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.grad_fn.__get__,  # type: ignore[attr-defined]
        torch.Tensor.is_leaf.__get__,  # type: ignore[attr-defined]
        torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    }
)


class LossRule:
    """What is counted in a step, who is told, and what a loss is then divided by.

    Args:
        model: the unwrapped model, to see whether it takes the count and shifts its targets.
        compute_loss_func: the user's loss function, if any.
        strategy: how counts are summed over ranks.
        average_tokens_across_devices: count over all ranks, not on this one only.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss_func: Callable[..., Any] | None,
        strategy: Strategy,
        *,
        average_tokens_across_devices: bool = True,
    ) -> None:
        self._strategy = strategy
        self._over_ranks = average_tokens_across_devices and strategy.world_size > 1
        self.tells_model = compute_loss_func is None and accepts_count(model)
        self._shifts = shifts_targets(model)
        self.counts = self.tells_model or (
            compute_loss_func is not None and takes_argument(compute_loss_func, "num_items_in_batch")
        )
        self._is_counted: bool | None = None
        self._probe: ItemCount | None = None

    def count(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor | None:
        """Count the targets of a step over all ranks, from host tensors; nothing is read from a device.

        Returns:
            A scalar tensor on the device, or None where the batches have no labels to count.
        """
        found = [self._count_one(batch.inputs) for batch in micro_batches if batch.weight > 0]
        known = [number for number in found if number is not None]
        if len(known) < len(found):
            return None
        total = torch.full((), sum(known), dtype=torch.int64, device=self._strategy.device)
        return self._strategy.sum(total) if self._over_ranks else total

    def count_inputs(self, inputs: Any) -> torch.Tensor | None:
        """Count the targets of one batch on this rank, staying on the device; None where it has no labels."""
        targets = self._targets(inputs)
        return None if targets is None else targets.ne(IGNORED_TARGET).sum()

    def hand_over(self, num_items: torch.Tensor) -> torch.Tensor:
        """Return the count to give to the loss: the first one notices its use."""
        if self._is_counted is not None:
            return num_items
        self._probe = ItemCount.of(num_items)
        return self._probe

    def normalise(self, loss: torch.Tensor, was_told: bool, size: int, weight: float) -> torch.Tensor:
        """Turn one micro-batch's loss into its share of the step's loss.

        Args:
            loss: scalar, as the model or loss function gave it.
            was_told: whether the count was handed over for it.
            size: micro-batches of the step.
            weight: weight of this rank's share of the micro-batch.
        """
        if was_told and self._uses_count():
            if weight == 0.0:  # a sample of another rank's, here so that this one takes part: it is counted there
                return loss * 0.0
            return loss * self._strategy.world_size if self._over_ranks else loss
        if weight != 1.0:
            loss = loss * weight
        return loss / size if size > 1 else loss

    def _uses_count(self) -> bool:
        if self._is_counted is None and self._probe is not None:
            self._is_counted = bool(self._probe.uses)
            self._probe = None
        return bool(self._is_counted)

    def _count_one(self, inputs: Any) -> int | None:
        targets = self._targets(inputs)
        return None if targets is None else int(targets.ne(IGNORED_TARGET).sum())

    def _targets(self, inputs: Any) -> torch.Tensor | None:
        if not isinstance(inputs, Mapping):
            return None
        shifted: Any = inputs.get("shift_labels")
        labels: Any = inputs.get("labels")
        if isinstance(shifted, torch.Tensor):
            return shifted
        if isinstance(labels, torch.Tensor) and self._shifts:
            # The first position of a sequence is nobody's target where the model predicts the next one.
            return labels[..., 1:]
        return labels if isinstance(labels, torch.Tensor) else None


def accepts_count(model: nn.Module) -> bool:
    """Whether a model's forward may be given `num_items_in_batch`.

    A class that says `accepts_loss_kwargs` is believed. Else the parameter must be named, or be taken by `**kwargs` of
    a model that has a `loss_function` to pass it to: any other `**kwargs` may refuse or ignore it.
    """
    declared = getattr(model, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = inspect.signature(model.forward).parameters
    if "num_items_in_batch" in parameters:
        return True
    has_kwargs = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return has_kwargs and "loss_function" in dir(type(model))


def shifts_targets(model: nn.Module) -> bool:
    """Whether a model predicts the next position itself, so that the first label of a row is no target."""
    if "loss_function" not in dir(type(model)) or getattr(model, "loss_type", None) is None:
        return False
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    function = getattr(model, "loss_function", None)
    return getattr(function, "__name__", "") == "ForCausalLMLoss" and not is_encoder_decoder


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with the keyword argument `name`."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
