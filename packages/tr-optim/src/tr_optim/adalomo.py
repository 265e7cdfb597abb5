"""AdaLomo: apply Adafactor during the backward pass, so that never all gradients are in memory."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from tr_optim.engine.checks import check_shapes, checked_state_dict
from tr_optim.engine.fused import FusedOptimizer
from tr_optim.engine.fused_checks import fused_options
from tr_optim.engine.precision import computing_dtype, store_rounded
from tr_optim.engine.shards import in_layout, load_states, local_part
from tr_optim.moments.adafactor import (
    BlockedUpdate,
    along,
    check_ranges,
    is_divided,
    stacked_moments,
    stacked_rms,
    start,
    state_shapes,
)
from tr_optim.moments.adam import check_rates
from tr_optim.options import ADALOMO_OPTIONS


class AdaLomo(FusedOptimizer):
    """Update each parameter by its factored second moment during the backward pass.

    For a parameter p of shape `(..., n, m)` with gradient g, at its t-th update, with b = 1 - t ** decay_rate:

        row <- b row + (1 - b) mean over m of (g^2 + eps[0])      col <- b col + (1 - b) mean over n of the same
        u = g / sqrt(row col / mean(row))                           u <- u / max(1, rms(u) / clip_threshold)
        rate = lr max(eps[1], rms(p))                               p <- p (1 - rate weight_decay) - rate u

    A parameter with less than two dimensions keeps its full second moment. It is `tr_optim.Adafactor` with
    `scale_parameter=True, relative_step=False` and no first moment, applied to each tensor as soon as it has a
    gradient. Each tensor has its own limit on u, so no total norm is needed. `clip_grad_norm` also clips by the total
    norm, exactly, in a second backward pass; the authors found it better and faster without.

    State of a parameter of n x m numbers: n + m float32 numbers and a step count, all tensors on its device, under
    Adafactor's names, so Adafactor's states load. `Lomo` describes `backward`, accumulation, ranks and weights used
    several times; the same holds here. With FSDP2's `fully_shard`, each rank keeps the means of its own rows, and all
    ranks keep those of a matrix's columns; `state_dict` has DTensors. The backward pass exchanges sums over the rows of
    all ranks: m + 2 numbers for each matrix, and one number twice. Three exchanges serve as many parameters as add up
    to the size of the largest.

    Args:
        params: parameters or parameter groups, each with its own `lr` and `weight_decay`.
        lr: learning rate, relative to each parameter's root mean square; the authors use 5e-4 to 1e-3.
        weight_decay: share of the weights, times the rate, that each step subtracts before the update.
        eps: added to squared gradients; and the least root mean square that a parameter is taken to have.
        clip_threshold: greatest root mean square of an update before the rate.
        decay_rate: negative; the t-th update takes in `t ** decay_rate` of the newest squares.
        clip_grad_norm: greatest total 2-norm of all gradients; None for no clipping.
        clip_grad_value: greatest absolute value in any gradient; instead of `clip_grad_norm`.
        accumulate: `refuse` or `store` (see `Lomo`).
        nonfinite: as for `Lomo`, but None without a loss scale is `skip_tensor`.
        stochastic_rounding: as for `Lomo`.
        seed: of that rounding.

    Raises:
        ValueError: an argument is out of range or contradicts another.
    """

    name = "adalomo"
    ordinary = "adafactor"
    nonfinite_unscaled = "skip_tensor"
    takes_shards = exchanges_statistics = stacks_shapes = True

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.0,
        *,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        accumulate: str = "refuse",
        nonfinite: str | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        check_rates(lr, weight_decay)
        check_ranges(eps, clip_threshold, decay_rate, None)
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
        }
        super().__init__(
            params,
            defaults,
            clip_grad_norm=clip_grad_norm,
            clip_grad_value=clip_grad_value,
            accumulate=accumulate,
            nonfinite=nonfinite,
            rounding_seed=seed if stochastic_rounding else None,
        )

    @classmethod
    def from_arguments(cls, params: Iterable[dict[str, Any]], args: Any) -> AdaLomo:
        """Build from training arguments: `learning_rate`, `max_grad_norm`, and `optim_args` for the rest.

        `optim_args` takes eps, clip_threshold, decay_rate, clip_grad_value, accumulate, nonfinite and
        stochastic_rounding. Each group has its own weight decay.

        Raises:
            ValueError: `optim_args` has an unknown option, or an argument is not supported.
        """
        return cls(params, args.learning_rate, **fused_options(args, cls.name, cls.ordinary, ADALOMO_OPTIONS))

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with DTensors for sharded parameters; `state` itself has this rank's parts."""
        return in_layout(super().state_dict(), self.param_groups, is_divided)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of this class or of an Adafactor without first moment.

        Raises:
            ValueError: its shapes or its kind of optimizer are different; nothing is changed then.
        """
        complete, states = checked_state_dict(state_dict, self.param_groups, self._check_saved)
        super().load_state_dict(complete)
        load_states(self, states, _copies, is_divided)

    def _check_saved(self, saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
        name = type(self).__name__
        check_shapes(saved, state_shapes(parameter.shape), parameter, name)
        if "exp_avg" in saved:
            raise ValueError(
                f"the saved optimizer state of a parameter of shape {tuple(parameter.shape)} has exp_avg, a first "
                f"moment, and {name} keeps none; resume with the optimizer that saved it, or begin with a new state"
            )

    def state_bytes(self, parameter: torch.Tensor) -> int:
        """Return the bytes of a parameter's state: of its rows, columns and step count."""
        shapes = state_shapes(local_part(parameter).shape).values()
        return (sum(shape.numel() for shape in shapes) + 1) * computing_dtype(parameter).itemsize

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        factor: torch.Tensor | None,
        leave_out: torch.Tensor | None,
    ) -> None:
        """Apply a gradient to its parameter (see `FusedOptimizer.update`)."""
        if parameter.numel() == 0:
            return
        update = self._begin(parameter, gradient, factor)
        group, state = self._group_of[id(parameter)], self.state[parameter]
        update.measure(state, group)
        update.take_in(state, group, leave_out)
        update.apply(group, leave_out, self._rounding.generator_of(self, parameter, group))

    def update_all(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        factor: torch.Tensor | None,
        leave_out: torch.Tensor | None,
    ) -> None:
        """Apply gradients to parameters of one shape: a fixed number of calls, whatever their number."""
        if len(parameters) == 1 or parameters[0].numel() == 0:
            super().update_all(parameters, gradients, factor, leave_out)
            return
        gradient = torch.stack(gradients).to(computing_dtype(parameters[0]))
        group, states = self._group_of[id(parameters[0])], [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                start(state, parameter)
        if factor is not None:
            gradient.mul_(factor)
        if self._max_value is not None:
            gradient.clamp_(-self._max_value, self._max_value)
        before = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        after = stacked_moments(before, gradient, group)
        weights = torch.stack(parameters).to(gradient.dtype)
        rate = stacked_rms(weights).clamp_(min=group["eps"][1]) * group["lr"]
        size = rate / (stacked_rms(gradient) / group["clip_threshold"]).clamp_(min=1.0)
        kept = weights * (1 - rate * group["weight_decay"]) if group["weight_decay"] != 0 else weights
        new = torch.addcmul(kept, gradient, size, value=-1)
        if leave_out is not None:
            leave_out = leave_out.expand(len(parameters))
            new = torch.where(along(leave_out, new), weights, new)
            after = {name: torch.where(along(leave_out, value), before[name], value) for name, value in after.items()}
        for name, moments in after.items():
            torch._foreach_copy_([state[name] for state in states], list(moments.unbind()))
        if new.dtype == parameters[0].dtype:
            torch._foreach_copy_(parameters, list(new.unbind()))
            return
        for parameter, own in zip(parameters, new.unbind(), strict=True):
            store_rounded(parameter, own, self._rounding.generator_of(self, parameter, group))

    def update_parts(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        factor: torch.Tensor | None,
        leave_out: list[torch.Tensor | None],
    ) -> None:
        """Apply parts of gradients to parts of parameters, with the statistics of whole ones."""
        shards = self._sharded[id(parameters[0])]
        parts = [
            (self._begin(p, g, factor), self._group_of[id(p)], self.state[p], leave_it)
            for p, g, leave_it in zip(parameters, gradients, leave_out, strict=True)
        ]
        sums = [update.measure(state, group) for update, group, state, _ in parts]
        shards.add_up(list(chain.from_iterable(sums)))
        sums = [update.take_in(state, group, leave_it) for update, group, state, leave_it in parts]
        shards.add_up(list(chain.from_iterable(sums)))
        for parameter, (update, group, _, leave_it) in zip(parameters, parts, strict=True):
            update.apply(group, leave_it, self._rounding.generator_of(self, parameter, group))

    def _begin(self, parameter: torch.Tensor, gradient: torch.Tensor, factor: torch.Tensor | None) -> BlockedUpdate:
        state = self.state[parameter]
        if not state:
            start(state, local_part(parameter))
        whole = parameter.shape if id(parameter) in self._sharded else None
        return BlockedUpdate(local_part(parameter), gradient, factor, self._max_value, whole)


def _copies(saved: dict[str, Any], parameter: torch.Tensor, _group: dict[str, Any]) -> dict[str, Any]:
    # torch rounds a state to its parameter's dtype and leaves `step` where it was.
    dtype, kept = computing_dtype(parameter), [name for name in saved if name.startswith(("step", "exp_avg_sq"))]
    return {name: torch.as_tensor(saved[name]).to(parameter.device, dtype, copy=True) for name in kept}
