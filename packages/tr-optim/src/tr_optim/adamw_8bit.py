"""AdamW with moments in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from tr_optim.engine.bases import Bases
from tr_optim.engine.checks import all_or_nothing, check_gradient, check_shapes, checked_state_dict
from tr_optim.engine.memory_estimate import optimizer_bytes
from tr_optim.engine.precision import Rounding, computing_dtype
from tr_optim.engine.settings import Engine, Place
from tr_optim.engine.shards import in_layout, local_part, out_of_layout, sharded_parameters, shards_of
from tr_optim.engine.updates import BackProjection, UpdateApplier
from tr_optim.moments.adam import (
    Adam8bitRule,
    check_adam,
    check_least_size,
    convert_loaded_state,
    is_quantized,
    is_to_be_quantized,
)
from tr_optim.options import read_options, whole_number
from tr_optim.projection.row_shards import is_divided


class AdamW8bit(Optimizer):
    """AdamW with moments in 8 bits; with the scales of their blocks 2.03 bytes an element in place of 8.

    With W the weights and g their gradient::

        M = b1 M + (1 - b1) g,  V = b2 V + (1 - b2) g^2
        W = (1 - lr wd) W - lr (M / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps)

    after which each 256 elements of a row of M, and of V, become codes, with a scale s of their own. A code c is for
    `s l(c)`; the 127 levels l of M, with a sign, and the 255 of V are those of floating point with 4 bits of mantissa
    in the upper half of the codes and 3 in the lower: for M from 3.3e-5 of the block's greatest, for V from 7.9e-9.
    Numbers between two levels are rounded up or down, by a threshold that changes with the step so that it is right on
    the average.

    Source: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit optimizers via block-wise quantization" (2022), for blocks
    with a scale; Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), for the rule, as
    torch.optim.AdamW has it. Deviations: floating point levels in place of the paper's dynamic tree. Rounded to the
    nearest number of that, V becomes 0 below 1.6e-7 of a block's greatest while M does not, so that where gradients in
    a block are further apart than 1 : 2500, or seldom anything but 0, single steps may be a hundred times the learning
    rate and more; here no V that is not 0 becomes 0. And the thresholds: rounded to the nearest, a V that changes by
    1/1000 a step would stay where it is. No layer is treated apart; to keep the moments of embeddings in float32, as
    the paper advises, give them a group with a great `min_8bit_size`.

    State: `step`; of a parameter with at least `min_8bit_size` elements, in m rows of n (all but the first dimension,
    flat; one row if there is one dimension), `exp_avg` int8 and `exp_avg_sq` uint8 of its shape, `exp_avg_scale` and
    `exp_avg_sq_scale` float32 `(m, ceil(n / 256))`: `2 m n + 8 m ceil(n / 256)` bytes; of others `exp_avg` and
    `exp_avg_sq` in float32. Of parameters that FSDP2 divides over ranks each rank has the rows that are its own, and a
    saved state may go on with another number of ranks, or one; those with one dimension have float32 moments then.

    Work space in a step does not grow with the parameters. Weights of low precision are updated in float32. The same
    gradients give the same bits, so replicas stay equal; nothing is read back from the device.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a tensor.
        betas: decay of the two moments.
        eps: added to the root of the second.
        weight_decay: share of the weights, times the learning rate, that every step takes away.
        min_8bit_size: parameters with fewer elements have float32 moments. It is of groups too, for states that are
            begun.

    Raises:
        ValueError: an argument is out of range, or a parameter is complex, or divided over ranks but by rows.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        min_8bit_size: int = 4096,
    ) -> None:
        check_adam(lr, betas, eps, weight_decay)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "min_8bit_size": min_8bit_size})

    @classmethod
    def from_arguments(cls, params: Iterable[dict[str, Any]], args: Any) -> AdamW8bit:
        """Build as training arguments say; `optim_args` may set min_8bit_size. Weight decay is that of each group.

        Raises:
            ValueError: `optim_args` has what this does not take.
        """
        options = read_options(args.optim_args, {"min_8bit_size": whole_number}, "adamw_8bit")
        betas = (args.adam_beta1, args.adam_beta2)
        return cls(params, args.learning_rate, betas, args.adam_epsilon, **options)

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that cannot be updated."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_least_size(group)
        for parameter in group["params"]:
            if parameter.is_complex():
                shape = tuple(parameter.shape)
                raise ValueError(
                    f"AdamW8bit: a parameter of shape {shape} is complex; only real ones have 8-bit moments"
                )
        sharded_parameters(group["params"], type(self).__name__, takes=True, instead="")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns what `closure` returns, if one is given."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        apply = UpdateApplier(Adam8bitRule(), Bases(Engine()), BackProjection(), Rounding(None), rotates=False)
        for index, (group, parameter) in enumerate(self._grouped()):
            if parameter.grad is None:
                continue
            check_gradient(parameter, parameter.grad)
            state, gradient = self.state[parameter], local_part(parameter.grad)
            shards = shards_of(parameter)
            if not (is_quantized(state) if state else is_to_be_quantized(gradient, group, shards)):
                gradient = gradient.to(computing_dtype(parameter))  # where a new state's dtype comes from
            apply(parameter, state, Place({"projects": False, **group}, index, 0, 0), gradient)
        return result

    def expected_bytes(self, micro_batches: int = 1) -> tuple[int, int]:
        """Return the bytes of all gradients, and those of the state after a step; of shards this rank's."""
        return optimizer_bytes(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state; of parameters in shards as DTensors, though `state` has this rank's parts."""
        return in_layout(super().state_dict(), self.param_groups, is_divided)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state, as copies: of this class as it is, of torch's AdamW rounded to the nearest codes.

        Raises:
            ValueError: it is of other shapes, or of another kind of optimizer; nothing has changed then.
        """
        complete, states = checked_state_dict(state_dict, self.param_groups, _check_saved)
        # torch would convert codes to their parameter's dtype.
        super().load_state_dict({**complete, "state": {}})
        for saved, (group, parameter) in zip(states, self._grouped(), strict=True):
            if saved is not None:
                names = [name for name in saved if name.startswith("exp_avg")]
                moments = {name: saved[name].to(parameter.device, copy=True) for name in names}
                self.state[parameter] = out_of_layout(moments, parameter, group, is_divided)
                self.state[parameter]["step"] = torch.tensor(float(saved["step"]), dtype=torch.float64)
        convert_loaded_state(self, state_dict["param_groups"])

    def _grouped(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        return [(group, parameter) for group in self.param_groups for parameter in group["params"]]


def _check_saved(saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
    check_shapes(saved, {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}, parameter, AdamW8bit.__name__)
