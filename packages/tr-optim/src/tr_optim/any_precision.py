"""AdamW with moments of any floating point type, and weights of low precision that lose no small update."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from tr_optim.engine.checks import all_or_nothing, check_gradient, check_real, check_shapes, checked_state_dict
from tr_optim.engine.memory_estimate import optimizer_bytes
from tr_optim.engine.precision import computing_dtype
from tr_optim.engine.shards import in_layout, load_states, local_part, sharded_parameters
from tr_optim.engine.updates import run_closure
from tr_optim.moments.adam import adam_options
from tr_optim.options import adam_arguments, flag, read_options

_DTYPES = {"exp_avg": "momentum_dtype", "exp_avg_sq": "variance_dtype", "compensation": "compensation_buffer_dtype"}


class AnyPrecisionAdamW(Optimizer):
    """AdamW whose moments have types of their own, with a sum that keeps what low precision rounds off.

    With `use_kahan_summation`, `compensation` holds of each weight what it lacks for being rounded. The next update is
    added to that first. So weights in bfloat16 move on by updates far below their own precision, and no copy of them in
    float32 is needed. Each update is computed in float32.

    The state holds tensors only: `step` (a float64 on the CPU), `exp_avg`, `exp_avg_sq`, and `compensation`. With
    FSDP2's `fully_shard` each rank keeps the state of its rows.

    Source: Loshchilov and Hutter, "Decoupled weight decay regularization" (2019); Kahan, "Further remarks on reducing
    truncation errors" (1965), for weights as in Zamirai et al., "Revisiting BFloat16 training" (2020), section 4.
    Deviation from torchdistX, whose names the arguments have: weight decay is a part of the update that is compensated;
    in torchdistX, bfloat16 rounds it off if `lr * weight_decay` is below 0.002.

    Args:
        params: parameters or parameter groups.
        lr: learning rate, a number or a tensor.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        use_kahan_summation: keep what rounding takes from the weights.
        momentum_dtype: of the first moment, as "float32" or "bfloat16".
        variance_dtype: of the second moment.
        compensation_buffer_dtype: of what is kept.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        use_kahan_summation: bool = False,
        momentum_dtype: str | torch.dtype = "float32",
        variance_dtype: str | torch.dtype = "float32",
        compensation_buffer_dtype: str | torch.dtype = "bfloat16",
    ) -> None:
        options: dict[str, Any] = {**adam_options(lr, betas, eps, weight_decay)}
        options["use_kahan_summation"] = use_kahan_summation
        # By name, for a state that is saved as text.
        options["momentum_dtype"] = _name_of(momentum_dtype)
        options["variance_dtype"] = _name_of(variance_dtype)
        options["compensation_buffer_dtype"] = _name_of(compensation_buffer_dtype)
        super().__init__(params, options)

    @classmethod
    def from_arguments(cls, params: Iterable[dict[str, Any]], args: Any) -> AnyPrecisionAdamW:
        """Build from training arguments; `optim_args` may set the three types and use_kahan_summation.

        Raises:
            ValueError: `optim_args` has an unknown option.
        """
        takes = {"use_kahan_summation": flag, **dict.fromkeys(_DTYPES.values(), _name_of)}
        options = read_options(args.optim_args, takes, "adamw_anyprecision")
        return cls(params, **adam_arguments(args), **options)

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that cannot be updated."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_real(group["params"], type(self).__name__)
        sharded_parameters(group["params"], type(self).__name__, takes=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns the result of `closure`, if one is given.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        result = run_closure(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.numel() > 0:
                    check_gradient(parameter, parameter.grad)
                    _update(local_part(parameter), local_part(parameter.grad), self.state[parameter], group)
        return result

    expected_bytes = optimizer_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with DTensors for sharded parameters; `state` itself has this rank's parts."""
        return in_layout(super().state_dict(), self.param_groups, _is_divided)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as copies, each part in the type that its group says.

        Raises:
            ValueError: its shapes or its kind of optimizer are different; nothing is changed then.
        """
        complete, states = checked_state_dict(state_dict, self.param_groups, _check_saved)
        # torch would round moments to their parameter's type.
        super().load_state_dict({**complete, "state": {}})
        load_states(self, states, _copies, _is_divided)


def _update(weights: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    if not state:
        # On the CPU, where arithmetic with it costs the device nothing.
        state["step"] = torch.zeros((), dtype=torch.float64)
        for name in _names(group):
            state[name] = torch.zeros_like(weights, dtype=_dtype(group, name, weights))
    state["step"] += 1
    (first, second), lr = group["betas"], group["lr"]
    dtype = computing_dtype(weights)
    gradient = gradient.to(dtype)
    state["exp_avg"].lerp_(gradient.to(state["exp_avg"].dtype), 1 - first)
    state["exp_avg_sq"].mul_(second).add_((gradient * gradient).to(state["exp_avg_sq"].dtype), alpha=1 - second)
    scale = state["exp_avg_sq"].to(dtype).div(1 - second ** state["step"]).sqrt_().add_(group["eps"])
    update = state["exp_avg"].to(dtype).div(scale).mul_(lr / (1 - first ** state["step"]))
    if group["weight_decay"] != 0:
        update.add_(weights.to(dtype) * (lr * group["weight_decay"]))
    if not group["use_kahan_summation"]:
        weights.copy_(weights.to(dtype).sub_(update))
        return
    compensation = state["compensation"]
    lacking = compensation.to(dtype).sub_(update)
    before = weights.to(dtype, copy=True)
    weights.copy_(before + lacking)
    compensation.copy_(lacking.add_(before.sub_(weights)))


def _names(group: dict[str, Any]) -> list[str]:
    return [name for name in _DTYPES if name != "compensation" or group["use_kahan_summation"]]


def _dtype(group: dict[str, Any], name: str, weights: torch.Tensor) -> torch.dtype:
    found = getattr(torch, group[_DTYPES[name]])
    # "float32" is as precise as it is computed: of float64 weights, in that.
    return torch.promote_types(found, weights.dtype) if found == torch.float32 else found


def _is_divided(name: str, *_: Any) -> bool:
    return True


def _copies(saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
    return {name: saved[name].to(parameter.device, _dtype(group, name, parameter), copy=True) for name in _names(group)}


def _check_saved(saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
    check_shapes(saved, dict.fromkeys(_names(group), parameter.shape), parameter, AnyPrecisionAdamW.__name__)


def _name_of(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise ValueError("needs a type such as float32, bfloat16 or float16")
    return name
