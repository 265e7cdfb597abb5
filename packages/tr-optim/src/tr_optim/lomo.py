"""LOMO: apply plain gradient descent during the backward pass, so that never all gradients are in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tr_optim.engine.checks import checked_state_dict, refuse_any_state
from tr_optim.engine.fused import FusedOptimizer
from tr_optim.engine.fused_checks import fused_options
from tr_optim.engine.precision import chunks, computing_dtype, store_rounded
from tr_optim.engine.shards import local_part
from tr_optim.moments.adam import check_rates


class Lomo(FusedOptimizer):
    """Subtract each gradient, times the learning rate, from its parameter during the backward pass.

    For a parameter p with gradient g: `p <- p (1 - lr * weight_decay) - lr * c * g`, where c is 1 or the clip
    coefficient. There is no state. Memory holds one or two gradients at a time, beside weights and activations.

        optimizer = Lomo(model.parameters(), lr=1e-2, clip_grad_norm=1.0)
        loss = model(**batch).loss
        optimizer.backward(loss)  # in place of loss.backward()
        optimizer.step()

    A plain `loss.backward()` only fills `.grad`. Half-precision weights are updated in float32 and rounded once,
    without a float32 copy: to nearest, or stochastically (see `tr_optim.engine.precision.Rounding`). For the latter,
    groups count steps as `rounded_steps`. Clipping by norm is exact and makes two backward passes through one graph.
    The first measures, the second applies; activations stay in memory for both. Several micro-batches in a step are
    refused, because their gradients cannot add up. `accumulate="store"` adds them up in `.grad`, in the memory of
    ordinary gradients, and then clips in one pass.

    Weights that are used several times in one forward pass are updated once. Under reentrant activation checkpointing
    their gradients come in parts, and the update follows at the end of the backward pass. To find such weights, the
    first backward pass under such checkpointing is preceded by one that only counts.

    With several ranks, call `bind`. Each gradient is then averaged as it comes, and replicas stay equal bit for bit. Do
    not wrap the model in something that averages too. With FSDP2's `fully_shard`, each rank updates its own rows;
    gradients come averaged.

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (2023,
    arXiv 2306.09782), Algorithm 1 and section 3.3. Deviations: hooks run after a gradient is accumulated, one call for
    each tensor, where the authors' scan all parameters in every call; weights change under version counting, so that
    autograd notices a graph that still needs an old one.

    Args:
        params: parameters or parameter groups, each with its own `lr` and `weight_decay`.
        lr: learning rate, a number or a tensor; the value in a group when `backward` is called counts.
        weight_decay: share of the weights, times the learning rate, that each step subtracts before the update.
        clip_grad_norm: greatest total 2-norm of all gradients; None for no clipping.
        clip_grad_value: greatest absolute value in any gradient; instead of `clip_grad_norm`, in one pass.
        accumulate: `refuse` or `store`.
        nonfinite: what is skipped if a gradient is infinite or NaN. `skip_step`: the whole step, exactly, at the cost
            of a second backward pass. `skip_tensor`: only its tensor, an approximation; but the whole step if all
            gradients are measured first anyway. None is `skip_step` with a loss scale; without one it skips nothing,
            like any optimizer.
        stochastic_rounding: round weights in bfloat16 or float16 up or down, so that small updates are not lost.
        seed: of that rounding.

    Raises:
        ValueError: an argument is out of range or contradicts another.
    """

    name = "lomo"
    ordinary = "sgd"
    takes_shards = True

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.0,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
        *,
        accumulate: str = "refuse",
        nonfinite: str | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        check_rates(lr, weight_decay)
        super().__init__(
            params,
            {"lr": lr, "weight_decay": weight_decay},
            clip_grad_norm=clip_grad_norm,
            clip_grad_value=clip_grad_value,
            accumulate=accumulate,
            nonfinite=nonfinite,
            rounding_seed=seed if stochastic_rounding else None,
        )

    @classmethod
    def from_arguments(cls, params: Iterable[dict[str, Any]], args: Any) -> Lomo:
        """Build from training arguments: `learning_rate`, `max_grad_norm`, and `optim_args` for the rest.

        `optim_args` takes clip_grad_value, accumulate, nonfinite and stochastic_rounding. Each group has its own weight
        decay.

        Raises:
            ValueError: `optim_args` has an unknown option, or an argument is not supported.
        """
        return cls(params, args.learning_rate, **fused_options(args, cls.name, cls.ordinary, {}))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the options of groups.

        Raises:
            ValueError: it is the state of another kind of optimizer; nothing is changed then.
        """
        complete, _ = checked_state_dict(state_dict, self.param_groups, refuse_any_state(type(self).__name__))
        super().load_state_dict(complete)

    def update(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        factor: torch.Tensor | None,
        leave_out: torch.Tensor | None,
    ) -> None:
        """Apply a gradient to its parameter (see `FusedOptimizer.update`)."""
        group = self._group_of[id(parameter)]
        rate, decay = group["lr"], group["weight_decay"]
        dtype = computing_dtype(parameter)
        generator = self._rounding.generator_of(self, parameter, group)
        for weights, part in chunks(local_part(parameter), gradient):
            new = weights.to(dtype, copy=leave_out is not None)
            part = part.to(dtype)
            if factor is not None:
                part.mul_(factor)
            if self._max_value is not None:
                part.clamp_(-self._max_value, self._max_value)
            if decay != 0:
                new.mul_(1 - rate * decay)
            if isinstance(rate, torch.Tensor):
                new.sub_(part.mul_(rate))
            else:
                new.add_(part, alpha=-rate)
            if leave_out is not None:
                new = torch.where(leave_out, weights, new)
            if new is not weights:
                store_rounded(weights, new, generator)

    def update_all(
        self,
        parameters: list[torch.Tensor],
        gradients: list[torch.Tensor],
        factor: torch.Tensor | None,
        leave_out: torch.Tensor | None,
    ) -> None:
        """Apply gradients to parameters of one group, dtype and device (see `FusedOptimizer.update_all`)."""
        group = self._group_of[id(parameters[0])]
        rate, decay, dtype = group["lr"], group["weight_decay"], parameters[0].dtype
        is_plain = leave_out is None and self._max_value is None and not isinstance(rate, torch.Tensor)
        if len(parameters) == 1 or not is_plain or computing_dtype(parameters[0]) != dtype:
            super().update_all(parameters, gradients, factor, leave_out)
            return
        if factor is not None:
            torch._foreach_mul_(gradients, factor)
        if decay != 0:
            torch._foreach_mul_(parameters, 1 - rate * decay)
        torch._foreach_add_(parameters, gradients, alpha=-float(rate))  # a number already: nothing is read
