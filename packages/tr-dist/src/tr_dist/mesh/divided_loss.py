"""Compute cross entropy from logits of which each process has those of some words, so that they are never gathered."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tr_dist.mesh.direction import NotGathered

_SIGNATURE = inspect.signature(F.cross_entropy)


class LogitsInParts(NotGathered):
    """Stands for logits in training, of which each process has those of some words, where the model has the loss."""

    why = (
        "logits whose words are divided (colwise_loss_parallel in tp_plan) are not gathered in training where the "
        "model computes the loss from labels; call it without labels, as compute_loss_func does, and they are whole, "
        "or divide the head by colwise_gather_output"
    )


class _CrossEntropy(torch.autograd.Function):
    """The loss of each target, the same on all processes; a gradient for the words that this one has.

    `softmax - (word is target)` needs nothing of other processes but the maximum, the sum, and the target's logit.
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor, first: int, group: dist.ProcessGroup) -> Any:
        most = logits.amax(-1)
        dist.all_reduce(most, dist.ReduceOp.MAX, group)
        powers = (logits - most.unsqueeze(-1)).exp_()
        is_here = (target >= first) & (target < first + logits.shape[-1])
        place = (target - first).where(is_here, 0).unsqueeze(-1)
        found = (logits.gather(-1, place).squeeze(-1) - most).where(is_here, 0)
        sums = torch.stack([powers.sum(-1), found])
        dist.all_reduce(sums, group=group)
        ctx.save_for_backward(powers.div_(sums[0].unsqueeze(-1)), place, is_here)
        return sums[0].log() - sums[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        shares, place, is_here = ctx.saved_tensors
        gradient = shares.scatter_add(-1, place, -is_here.unsqueeze(-1).to(shares.dtype))
        return gradient * gradients[0].unsqueeze(-1), None, None, None


class CrossEntropyOfParts(TorchFunctionMode):
    """Computes `F.cross_entropy` of logits whose words are divided; whatever else is called is torch's own.

    Attributes:
        computed: whether it has computed one.
    """

    computed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.cross_entropy:
            given = _SIGNATURE.bind(*args, **(kwargs or {})).arguments
            if isinstance(given["input"], DTensor):
                self.computed = True
                return cross_entropy(**given)
        return func(*args, **(kwargs or {}))


def cross_entropy(
    input: DTensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    **others: Any,
) -> torch.Tensor:
    """Return `F.cross_entropy` of logits whose classes (dimension 1) are divided over the processes of a mesh.

    Args:
        input: `(n, classes, ...)`, or `(classes,)`.
        target: numbers of classes, `(n, ...)`, the same on all processes.
        ignore_index: target whose loss is 0 and does not count in the mean.
        reduction: `mean`, `sum` or `none`.
        **others: must be what they are by default.

    Raises:
        ValueError: another argument is set, or targets are probabilities, or the logits are divided otherwise.
    """
    classes = min(1, input.dim() - 1)
    wrong = [f"{name}={value!r}" for name, value in others.items() if value != _SIGNATURE.parameters[name].default]
    if reduction not in ("mean", "sum", "none"):
        wrong += [f"{reduction=}"]
    if target.is_floating_point():
        wrong += ["probabilities as target"]
    if input.placements != (Shard(classes),):
        wrong += [f"logits of shape {tuple(input.shape)} placed as {input.placements}"]
    if wrong:
        raise ValueError(
            f"cross_entropy of logits whose words are divided (colwise_loss_parallel in tp_plan) is not done with "
            f"{', '.join(wrong)}; divide the head by colwise_gather_output"
        )
    local = input.to_local().movedim(classes, -1)
    first = local.shape[-1] * input.device_mesh.get_local_rank()
    counts = target != ignore_index
    is_a_class = (target >= 0) & (target < input.shape[classes])
    torch._assert_async((is_a_class | ~counts).all(), f"a target is not from 0 to {input.shape[classes] - 1}")
    local = local.to(torch.promote_types(local.dtype, torch.float32))
    losses = _CrossEntropy.apply(local, target, first, input.device_mesh.get_group()).where(counts, 0)
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


def whole(value: Any) -> Any:
    """Return an output of a model with all its words, if it is divided."""
    return value.redistribute(placements=[Replicate()]).to_local() if isinstance(value, DTensor) else value
