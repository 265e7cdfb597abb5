"""Apply Adafactor's rule to gradients and projections of gradients.

`BlockedUpdate` computes the same for one tensor, block by block. It makes no copy of the gradient or of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tr_optim.engine import precision
from tr_optim.engine.precision import computing_dtype, store_rounded
from tr_optim.engine.shards import Shards
from tr_optim.projection.refresh import Rotation


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
        """Add this rule's moments to a new state."""
        start_moments(state, like, group["beta1"] is not None)

    def rotate(self, state: dict[str, Any], rotation: Rotation) -> None:
        """Rotate the moments to another basis."""
        if "exp_avg" in state:
            state["exp_avg"] = rotation.first(state["exp_avg"])
        state["exp_avg_sq_row"] = rotation.second_rows(state["exp_avg_sq_row"])
        state["exp_avg_sq_col"] = rotation.second_columns(state["exp_avg_sq_col"])

    def update(
        self, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any], weights: torch.Tensor
    ) -> tuple[torch.Tensor, Any]:
        """Update the moments with a gradient, and return the update.

        Returns:
            The update to subtract from the weights, in the gradient's coordinates, and the rate for weight decay.
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


def start_moments(state: dict[str, Any], gradient: torch.Tensor, with_first_moment: bool) -> None:
    """Add moments of zero to a new state."""
    if with_first_moment:
        state["exp_avg"] = torch.zeros_like(gradient)
    state |= {name: gradient.new_zeros(shape) for name, shape in state_shapes(gradient.shape).items()}


def normalised(
    gradient: torch.Tensor,
    state: dict[str, Any],
    group: dict[str, Any],
    shards: Shards | None = None,
    *others: torch.Tensor,
) -> torch.Tensor:
    """Update the second moment with the squared gradient, and divide the gradient by its root.

    For a gradient of some rows, sums over rows are summed over the ranks, together with `others`, in place.
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


def stacked_moments(
    before: dict[str, torch.Tensor], gradient: torch.Tensor, group: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return the new moments of parameters of one shape, and turn their gradients into updates before their limit.

    Args:
        before: their states, stacked; are not changed.
        gradient: their gradients, stacked; becomes the updates.
        group: their group.
    """
    step, squares, eps = before["step"] + 1, gradient.square(), group["eps"][0]
    share = step.pow(group["decay_rate"])
    if gradient.dim() < 3:
        moment = torch.lerp(before["exp_avg_sq"], squares.add_(eps), along(share, squares))
        gradient.mul_(moment.rsqrt())
        return {"step": step, "exp_avg_sq": moment}
    row, column = squares.mean(dim=-1).add_(eps), squares.mean(dim=-2).add_(eps)
    row = torch.lerp(before["exp_avg_sq_row"], row, along(share, row))
    column = torch.lerp(before["exp_avg_sq_col"], column, along(share, column))
    gradient.mul_((row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)).mul_(column.rsqrt().unsqueeze(-2))
    return {"step": step, "exp_avg_sq_row": row, "exp_avg_sq_col": column}


def stacked_rms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of each tensor in a stack, to be broadcast."""
    each = tensor.view(len(tensor), -1)
    return along(torch.linalg.vector_norm(each, dim=1).div_(each.shape[1] ** 0.5), tensor)


def along(values: torch.Tensor, stack: torch.Tensor) -> torch.Tensor:
    """Return one value for each tensor in a stack, to be broadcast."""
    return values.view(-1, *(1 for _ in stack.shape[1:]))


def step_size(
    weights: torch.Tensor, group: dict[str, Any], step: torch.Tensor, size: torch.Tensor | None = None
) -> float | torch.Tensor:
    """Return the learning rate of a step: relative to the step's number and to the weights, if the group asks for it.

    `size` is the root mean square of the whole parameter, if `weights` are some of its rows.
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
    """Raise if arguments contradict each other about the step size."""
    if lr is not None and relative_step:
        raise ValueError(f"lr={lr} and relative_step=True both set the step size; set relative_step=False to use lr")
    if lr is None and not relative_step:
        raise ValueError("relative_step=False needs a learning rate; give lr, for instance 1e-3")
    if lr is not None and not isinstance(lr, torch.Tensor) and lr < 0:
        raise ValueError(f"lr={lr:g} must not be negative")
    if warmup_init and not relative_step:
        raise ValueError("warmup_init=True warms up relative steps; set relative_step=True, or use a schedule for lr")


def check_ranges(eps: tuple[float, float], clip_threshold: float, decay_rate: float, beta1: float | None) -> None:
    """Raise if an argument is out of range."""
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


class BlockedUpdate:
    """One tensor's update, computed block by block: no copy of the tensor is made.

    Call `measure`, `take_in` and `apply` in this order. The first two return tensors to sum, in place, over the ranks
    that hold other rows, if there are any.

    Args:
        weights: the parameter, changed in place.
        gradient: of the same shape.
        factor: factor of the gradient.
        max_value: limit of its numbers after that.
        whole: shape of the whole tensor, if these are some of its rows; None if these are all.
    """

    def __init__(
        self,
        weights: torch.Tensor,
        gradient: torch.Tensor,
        factor: torch.Tensor | None,
        max_value: float | None,
        whole: torch.Size | None = None,
    ) -> None:
        shape = weights.shape if whole is None else whole
        self._has_rows, self._divides_matrix = len(shape) >= 2, whole is not None and len(shape) == 2
        self._num_rows, self._num_numbers = shape[-2] if self._has_rows else 1, shape.numel()
        self._parameter, contiguous = weights, weights.contiguous()
        self._weights, self._gradient = _as_matrices(contiguous), _as_matrices(gradient.contiguous())
        self._factor, self._max_value = factor, max_value
        self._dtype = computing_dtype(weights)
        self._blocks = list(blocks_of(self._weights))
        self._kept: torch.Tensor | None = None
        self._scales: list[torch.Tensor] = []  # what a gradient is multiplied by, to be broadcast

    def measure(self, state: dict[str, Any], group: dict[str, Any]) -> list[torch.Tensor]:
        """Sum up squares: of the gradient by rows and columns, and of the weights."""
        count, rows, columns = self._weights.shape
        options: dict[str, Any] = {"device": self._weights.device, "dtype": self._dtype}
        means = torch.zeros((count, rows, 1), **options)
        self._columns = torch.zeros((count, 1, columns), **options)
        for block in self._blocks:
            squares = self._part(block).square_().add_(group["eps"][0])
            if self._has_rows:
                means[block] = squares.mean(dim=-1, keepdim=True)
            self._columns[block[0]] += squares.sum(dim=-2, keepdim=True)
        self._step = state["step"] + 1
        self._share = self._step.pow(group["decay_rate"])
        sizes = [torch.linalg.vector_norm(self._weights[block], dtype=self._dtype) for block in self._blocks]
        self._size = self._square(sizes)
        if not self._has_rows:
            return [self._size]
        self._row = torch.lerp(state["exp_avg_sq_row"].view_as(means), means, self._share)
        self._row_sum = self._row.sum(dim=-2, keepdim=True)
        return [self._size, self._columns, self._row_sum] if self._divides_matrix else [self._size]

    def take_in(
        self, state: dict[str, Any], group: dict[str, Any], leave_out: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Update the second moment with the squared gradient, and sum the squares of the update."""
        before = state["exp_avg_sq_col" if self._has_rows else "exp_avg_sq"].view_as(self._columns)
        column = torch.lerp(before, self._columns.div_(self._num_rows), self._share)
        before.copy_(_unless(leave_out, column, before))
        scales = [column]
        if self._has_rows:
            before = state["exp_avg_sq_row"].view_as(self._row)
            before.copy_(_unless(leave_out, self._row, before))
            scales.insert(0, self._row.div_(self._row_sum.div_(self._num_rows)))
        state["step"].copy_(_unless(leave_out, self._step, state["step"]))
        self._scales = [scale.rsqrt_() for scale in scales]
        self._update_size = self._square([torch.linalg.vector_norm(self._update(block)) for block in self._blocks])
        return [self._update_size]

    def apply(
        self, group: dict[str, Any], leave_out: torch.Tensor | None, generator: torch.Generator | None = None
    ) -> None:
        """Change the weights; `generator` rounds those of low precision stochastically."""
        rate = self._rms(self._size).clamp_(min=group["eps"][1]) * group["lr"]
        size = rate / (self._rms(self._update_size) / group["clip_threshold"]).clamp_(min=1.0)
        for block in self._blocks:
            weights = self._weights[block]
            new = weights.to(self._dtype, copy=leave_out is not None)
            if group["weight_decay"] != 0:
                new.mul_(1 - rate * group["weight_decay"])
            new.sub_(self._update(block).mul_(size))
            store_rounded(weights, _unless(leave_out, new, weights), generator)
        if not self._parameter.is_contiguous():
            self._parameter.copy_(self._weights.view(self._parameter.shape))

    def _part(self, block: tuple[slice, slice]) -> torch.Tensor:
        """Return a block of the gradient, a copy in the computing dtype."""
        part = self._gradient[block].to(self._dtype, copy=True)
        if self._factor is not None:
            part.mul_(self._factor)
        if self._max_value is not None:
            part.clamp_(-self._max_value, self._max_value)
        return part

    def _update(self, block: tuple[slice, slice]) -> torch.Tensor:
        """Return a block of the update before its limit; the only block is computed once."""
        if self._kept is not None:
            return self._kept
        update = self._part(block)
        for scale in self._scales:
            # A row's scale has the block's rows, a column's all that there are.
            update.mul_(scale[block] if scale.shape[1] > 1 else scale[block[0]])
        if len(self._blocks) == 1:
            self._kept = update
        return update

    def _square(self, norms: list[torch.Tensor]) -> torch.Tensor:
        if not norms:  # this rank has no row
            return torch.zeros((), device=self._weights.device, dtype=self._dtype)
        return torch.linalg.vector_norm(torch.stack(norms)).square_()

    def _rms(self, square: torch.Tensor) -> torch.Tensor:
        return (square / self._num_numbers).sqrt_()


def start(state: dict[str, Any], parameter: torch.Tensor) -> None:
    """Add moments of zero to a new state, and its step count; `parameter` may be some rows of a whole one."""
    options: dict[str, Any] = {"device": parameter.device, "dtype": computing_dtype(parameter)}
    state["step"] = torch.zeros((), **options)
    state |= {name: torch.zeros(shape, **options) for name, shape in state_shapes(parameter.shape).items()}


def state_shapes(shape: torch.Size) -> dict[str, torch.Size]:
    """Return the moments of a parameter of a shape, by name."""
    if len(shape) < 2:
        return {"exp_avg_sq": shape}
    return {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": shape[:-2] + shape[-1:]}


def is_divided(name: str, shards: Shards, group: Mapping[str, Any]) -> bool:
    """Whether a moment of a parameter in shards has its rows; column means of a matrix are the same on all ranks."""
    return not (name == "exp_avg_sq_col" and shards.divides_matrix)


def _as_matrices(tensor: torch.Tensor) -> torch.Tensor:
    shape = tensor.shape
    return tensor.view(shape[:-2].numel(), *shape[-2:]) if len(shape) >= 2 else tensor.view(1, 1, tensor.numel())


def blocks_of(tensor: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the matrices and rows to compute with at a time: several matrices, or a part of one."""
    count, rows, columns = tensor.shape
    limit = precision.piece_size(tensor)
    if tensor.numel() == 0:
        return
    if rows * columns <= limit:
        size = max(1, limit // (rows * columns))
        for start in range(0, count, size):
            yield slice(start, start + size), slice(None)
    else:
        size = max(1, limit // columns)
        for number_of in range(count):
            for start in range(0, rows, size):
                yield slice(number_of, number_of + 1), slice(start, start + size)


def _unless(leave_out: torch.Tensor | None, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new if leave_out is None else torch.where(leave_out, old, new)
