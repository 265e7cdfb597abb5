"""Adafactor's rule, for gradients and projections of gradients."""

from __future__ import annotations

from typing import Any

import torch

from tr_optim.engine.shards import Shards
from tr_optim.projection.rotation import Rotation


class AdafactorRule:
    """Scale a gradient by row and column means of its square, and limit the update's root mean square.

    State of a (projected) gradient R of shape `(..., m, n)`: `exp_avg_sq_row` `(..., m)` and `exp_avg_sq_col`
    `(..., n)`, or `exp_avg_sq` if it has less than two dimensions; `exp_avg` of R's shape with `beta1`. For the source
    see `tr_optim.Adafactor`; of a projected gradient the update is limited, and kept with `beta1`, before it is
    projected back.

    Attributes:
        decays_after: whether weight decay follows the update.
        is_elementwise: the means are over rows and columns.
    """

    decays_after = is_elementwise = False

    def start(
        self, state: dict[str, Any], like: torch.Tensor, group: dict[str, Any], shards: Shards | None = None
    ) -> None:
        """Give a new state what this rule remembers."""
        start(state, like, group["beta1"] is not None)

    def rotate(self, state: dict[str, Any], rotation: Rotation) -> None:
        """Carry the state over to another basis."""
        if "exp_avg" in state:
            state["exp_avg"] = rotation.first(state["exp_avg"])
        state["exp_avg_sq_row"] = rotation.second_rows(state["exp_avg_sq_row"])
        state["exp_avg_sq_col"] = rotation.second_columns(state["exp_avg_sq_col"])

    def update(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], weights: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Take in a gradient.

        Returns:
            What is to be subtracted from the weights, in the gradient's coordinates, and the rate that weight decay is
            multiplied by.
        """
        update = normalised(gradient, state, group)
        return self._limited(update, rms(update), step_size(weights, group, state["step"]), state, group)

    def update_rows(
        self,
        gradient: torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
        weights: torch.Tensor,
        shards: Shards,
        *,
        has_rows: bool,
    ) -> tuple[torch.Tensor, Any]:
        """Take in a gradient of some rows, in two exchanges (see `tr_optim.engine.settings.RowRule.update_rows`)."""
        size = weights.norm(2).square()
        if has_rows:
            update = normalised(gradient, state, group, shards, size)
            square = update.norm(2).square()
            shards.add_up([square])
        else:
            update = normalised(gradient, state, group)
            square = update.norm(2).square()
            shards.add_up([size])
        count = shards.shape[0] * update.shape[1:].numel() if has_rows else update.numel()
        rate = step_size(weights, group, state["step"], (size / shards.shape.numel()).sqrt())
        return self._limited(update, (square / count).sqrt(), rate, state, group)

    def _limited(
        self,
        update: torch.Tensor,
        size: torch.Tensor,
        rate: float | torch.Tensor,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> tuple[torch.Tensor, Any]:
        update.div_((size / group["clip_threshold"]).clamp_(min=1.0)).mul_(rate)
        if group["beta1"] is not None:
            update = state["exp_avg"].mul_(group["beta1"]).add_(update, alpha=1 - group["beta1"]).clone()
        return update, rate


def start(state: dict[str, Any], gradient: torch.Tensor, with_first_moment: bool) -> None:
    """Give a new state its moments, all zero."""
    if with_first_moment:
        state["exp_avg"] = torch.zeros_like(gradient)
    if gradient.dim() >= 2:
        state["exp_avg_sq_row"] = gradient.new_zeros(gradient.shape[:-1])
        state["exp_avg_sq_col"] = gradient.new_zeros((*gradient.shape[:-2], gradient.shape[-1]))
    else:
        state["exp_avg_sq"] = torch.zeros_like(gradient)


def normalised(
    gradient: torch.Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    shards: Shards | None = None,
    *others: torch.Tensor,
) -> torch.Tensor:
    """Take the squared gradient into the second moment and divide the gradient by its root.

    Where it is of some rows, sums over rows are added up over the ranks, and with them, in place, `others`.
    """
    share = state["step"].pow(group["decay_rate"])  # 0-dim on the CPU: other devices take it as a number
    new, old = share.to(gradient.dtype), (1.0 - share).to(gradient.dtype)
    squares = gradient.square().add_(group["eps"][0])
    if gradient.dim() < 2:
        if shards is not None:
            shards.add_up(others)
        moment = state["exp_avg_sq"].mul_(old).add_(squares.mul_(new))
        return moment.rsqrt().mul_(gradient)
    row = state["exp_avg_sq_row"].mul_(old).add_(squares.mean(dim=-1).mul_(new))
    column_mean, row_mean = squares.sum(dim=-2), row.sum(dim=-1, keepdim=True)
    rows = gradient.shape[-2]
    if shards is not None:
        rows = shards.shape[-2]
        shards.add_up([*others, column_mean, row_mean] if shards.divides_matrix else others)
    column = state["exp_avg_sq_col"].mul_(old).add_(column_mean.div_(rows).mul_(new))
    row_factor = (row / row_mean.div_(rows)).rsqrt_().unsqueeze(-1)
    return torch.mul(row_factor, column.rsqrt().unsqueeze(-2)).mul_(gradient)


def step_size(
    weights: torch.Tensor, group: dict[str, Any], step: torch.Tensor, size: torch.Tensor | None = None
) -> float | torch.Tensor:
    """Return the learning rate of a step: relative to the step's number, and to the weights, where a group says so.

    `size` is the root mean square of the whole parameter, where `weights` are some of its rows.
    """
    rate = group["lr"]
    if group["relative_step"]:
        first = step * 1e-6 if group["warmup_init"] else torch.full_like(step, 1e-2)
        rate = torch.minimum(first, step.rsqrt()).to(weights.dtype)
    if group["scale_parameter"]:
        rate = (rms(weights) if size is None else size).clamp(min=group["eps"][1]) * rate
    return rate


def rms(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's root mean square."""
    return tensor.norm(2) / tensor.numel() ** 0.5


def check_step_size(lr: float | torch.Tensor | None, relative_step: bool, warmup_init: bool) -> None:
    """Raise where arguments contradict each other about the step size."""
    if lr is not None and relative_step:
        raise ValueError(f"lr={lr} and relative_step=True both set the step size; set relative_step=False to use lr")
    if lr is None and not relative_step:
        raise ValueError("relative_step=False needs a learning rate; give lr, for instance 1e-3")
    if lr is not None and not isinstance(lr, torch.Tensor) and lr < 0:
        raise ValueError(f"lr={lr:g} must not be negative")
    if warmup_init and not relative_step:
        raise ValueError("warmup_init=True warms up relative steps; set relative_step=True, or use a schedule for lr")


def check_ranges(eps: tuple[float, float], clip_threshold: float, decay_rate: float, beta1: float | None) -> None:
    """Raise where an argument is out of range."""
    if len(eps) != 2 or min(eps) < 0:
        raise ValueError(f"eps={eps} must be two numbers from 0: added to squared gradients, least parameter scale")
    if clip_threshold <= 0:
        raise ValueError(
            f"clip_threshold={clip_threshold:g} must be positive: the greatest root mean square of an update"
        )
    if decay_rate >= 0:
        raise ValueError(f"decay_rate={decay_rate:g} must be negative, for instance -0.8")
    if beta1 is not None and not 0 <= beta1 < 1:
        raise ValueError(f"beta1={beta1:g} must be from 0 to below 1, or None for no first moment")
