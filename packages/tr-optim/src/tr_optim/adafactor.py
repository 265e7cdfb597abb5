"""Adafactor: adaptive learning rates from row and column statistics instead of a second moment per weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from tr_optim.engine.checks import all_or_nothing, check_shapes, checked_state_dict
from tr_optim.engine.fused_checks import check_dense_and_real
from tr_optim.engine.memory_estimate import optimizer_bytes
from tr_optim.engine.precision import Rounding, check_has_low_precision, computing_dtype, store_rounded
from tr_optim.engine.shards import in_layout, load_states, local_part, sharded_parameters, shards_of
from tr_optim.engine.updates import run_closure
from tr_optim.moments.adafactor import (
    AdafactorRule,
    check_ranges,
    check_step_size,
    is_divided,
    start_moments,
    state_shapes,
)
from tr_optim.options import ADAFACTOR_OPTIONS, flag, read_options

_OPTIONS = {**ADAFACTOR_OPTIONS, "stochastic_rounding": flag}


class Adafactor(Optimizer):
    """Scale each update by a second moment that is stored as row and column means.

    For a parameter of shape `(..., n, m)` the state is `(..., n)` and `(..., m)` numbers instead of `(..., n, m)`. A
    parameter with less than two dimensions keeps its full second moment. The update is then scaled down to a root mean
    square of `clip_threshold`. Half-precision parameters are updated in float32, and their state is float32. The
    weights are rounded back without a float32 copy: to nearest, or stochastically (see
    `tr_optim.engine.precision.Rounding`).

    A step reads no value back from the device. The state holds tensors only: `step` (completed steps, a float64 on the
    CPU), `exp_avg_sq_row` and `exp_avg_sq_col` or `exp_avg_sq`, and `exp_avg` with `beta1`. With FSDP2's `fully_shard`,
    each rank keeps the state of its rows, and `step` exchanges sums over rows. `state_dict` has DTensors.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (2018): Algorithm 4
    (matrices) and Algorithm 5 (vectors), with the decay of section 7.2 and the relative step of section 8. Deviations,
    shared with the implementations in fairseq and transformers: the factors come from row and column means, not
    sums, and weight decay is decoupled and taken before the update.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a tensor; None with `relative_step`.
        eps: added to squared gradients; and the least root mean square that `scale_parameter` takes a parameter to
            have.
        clip_threshold: greatest root mean square of an update before the learning rate.
        decay_rate: negative; after t steps the second moment takes in `t ** decay_rate` of the newest squares.
        beta1: decay of a first moment of the updates; None keeps none.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        scale_parameter: multiply the learning rate by the parameter's root mean square.
        relative_step: take `min(1e-2, 1 / sqrt(step))` for the learning rate.
        warmup_init: with `relative_step`, begin with `1e-6 * step` instead of 1e-2.
        stochastic_rounding: round half-precision weights up or down, so that small updates are not lost.
        seed: of that rounding.

    Raises:
        ValueError: an argument is out of range or contradicts another.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor | None = None,
        *,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        check_step_size(lr, relative_step, warmup_init)
        check_ranges(eps, clip_threshold, decay_rate, beta1)
        defaults = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate, "beta1": beta1}
        defaults |= {"weight_decay": weight_decay, "scale_parameter": scale_parameter}
        defaults |= {"relative_step": relative_step, "warmup_init": warmup_init}
        super().__init__(params, defaults)
        self._rounding = Rounding(seed if stochastic_rounding else None)
        if stochastic_rounding:
            check_has_low_precision((p for group in self.param_groups for p in group["params"]), type(self).__name__)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of."""
        return {**super().__getstate__(), "_rounding": self._rounding}

    @classmethod
    def from_arguments(cls, params: Iterable[dict[str, Any]], args: Any) -> Adafactor:
        """Build from training arguments: `learning_rate`, and `optim_args` for the rest.

        The learning rate is that of the arguments and their schedule, so neither relative steps nor the parameters'
        scale change it, unless `optim_args` sets `scale_parameter`. It takes eps, clip_threshold, decay_rate, beta1
        and stochastic_rounding too. Each group has its own weight decay.

        Raises:
            ValueError: `optim_args` has what Adafactor does not take.
        """
        options = {"scale_parameter": False, **read_options(args.optim_args, _OPTIONS, "adafactor")}
        if options.get("stochastic_rounding"):
            options["seed"] = args.seed
        return cls(params, args.learning_rate, **options, relative_step=False)

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that ranks divide in another way than by rows."""
        super().add_param_group(param_group)
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        sharded_parameters(parameters, type(self).__name__, takes=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns the result of `closure`, if one is given.

        Raises:
            RuntimeError: a gradient is sparse or complex.
        """
        result = run_closure(closure)
        number_of = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel() > 0:
                    _update(parameter, group, self.state[parameter], self._rounding, number_of)
                number_of += 1
        return result

    expected_bytes = optimizer_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with DTensors for sharded parameters; `state` itself has this rank's parts."""
        return in_layout(super().state_dict(), self.param_groups, is_divided)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, of this class or of transformers' Adafactor.

        Raises:
            ValueError: its shapes or its kind of optimizer are different; nothing is changed then.
        """
        complete, states = checked_state_dict(state_dict, self.param_groups, _check_saved)
        super().load_state_dict(complete)
        load_states(self, states, _copies, is_divided)


def _copies(saved: dict[str, Any], parameter: torch.Tensor, _group: dict[str, Any]) -> dict[str, Any]:
    # torch rounds a state to its parameter's dtype; that of bfloat16 weights is float32.
    dtype = computing_dtype(parameter)
    moments = {name: value for name, value in saved.items() if name.startswith("exp_avg")}
    return {n: torch.as_tensor(value).to(parameter.device, dtype, copy=True) for n, value in moments.items()}


def _check_saved(saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
    needed = state_shapes(parameter.shape)
    if group["beta1"] is not None:
        needed["exp_avg"] = parameter.shape
    check_shapes(saved, needed, parameter, Adafactor.__name__)


def _update(
    parameter: torch.Tensor, group: dict[str, Any], state: dict[str, Any], rounding: Rounding, number_of: int
) -> None:
    check_dense_and_real(parameter.grad, "Adafactor")  # type: ignore[arg-type]
    dtype, shards = computing_dtype(parameter), shards_of(parameter)
    own, gradient = local_part(parameter), local_part(parameter.grad).to(dtype)  # type: ignore[arg-type]
    weights = own.to(dtype)  # the parameter itself, unless it is of low precision
    if not state:
        # On the CPU, where arithmetic with it costs the device nothing; in float64 every step can be counted.
        state["step"] = torch.zeros((), dtype=torch.float64)
        start_moments(state, gradient, group["beta1"] is not None)
    state["step"] += 1

    rule = AdafactorRule()
    if shards is None:
        update, rate = rule.update(gradient, state, group, weights)
    else:
        update, rate = rule.update_rows(gradient, state, group, weights, shards, has_rows=True)
    if group["weight_decay"] != 0:
        weights.sub_(weights * (group["weight_decay"] * rate))
    weights.sub_(update)
    if weights is not own:
        store_rounded(own, weights, rounding.generator(parameter, number_of, state["step"]))
