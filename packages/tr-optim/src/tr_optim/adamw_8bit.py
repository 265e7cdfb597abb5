"""AdamW with moments in 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from tr_optim.engine.checks import all_or_nothing, check_gradient, check_real, check_shapes, checked_state_dict
from tr_optim.engine.memory_estimate import optimizer_bytes
from tr_optim.engine.precision import computing_dtype
from tr_optim.engine.shards import in_layout, load_states, local_part, sharded_parameters, shards_of
from tr_optim.engine.updates import run_closure, update_in_pieces
from tr_optim.moments.adam import (
    Adam8bitRule,
    adam_options,
    check_least_size,
    convert_loaded_state,
    is_to_be_quantized,
)
from tr_optim.options import adam_arguments, read_options, whole_number
from tr_optim.projection.layout import is_divided


class AdamW8bit(Optimizer):
    """AdamW with moments in 8 bits: with the scales of blocks, 2.03 bytes an element instead of 8.

    With W the weights and g their gradient::

        M = b1 M + (1 - b1) g,  V = b2 V + (1 - b2) g^2
        W = (1 - lr wd) W - lr (M / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps)

    Then each 256 elements of a row of M, and of V, become codes with a scale s of their own. A code c means `s l(c)`. M
    has 127 levels l and a sign, V has 255. They are floating point numbers with 4 bits of mantissa in the upper half of
    the codes and 3 in the lower. The smallest level is 3.3e-5 of the block's greatest for M, and 7.9e-9 for V. Numbers
    between two levels are rounded up or down, by a threshold that changes with the step, so that the mean is right.

    Source: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit optimizers via block-wise quantization" (2022), for blocks
    with a scale; Loshchilov and Hutter, "Decoupled weight decay regularization" (2019), for the rule, as
    torch.optim.AdamW has it. Deviations: floating point levels instead of the paper's dynamic tree. With that tree, V
    is rounded to 0 below 1.6e-7 of a block's greatest while M is not. Then single steps may be a hundred times the
    learning rate and more, if gradients in a block differ by more than 1 : 2500 or are mostly 0. Here no V except 0
    becomes 0. The thresholds are new too: rounded to nearest, a V that changes by 1/1000 a step would never change. No
    layer is treated differently. To keep the moments of embeddings in float32, as the paper advises, give them a group
    with a large `min_8bit_size`.

    State: `step`; of a parameter with at least `min_8bit_size` elements, in m rows of n (all but the first dimension,
    flat; one row if there is one dimension), `exp_avg` int8 and `exp_avg_sq` uint8 of its shape, `exp_avg_scale` and
    `exp_avg_sq_scale` float32 `(m, ceil(n / 256))`: `2 m n + 8 m ceil(n / 256)` bytes; of others `exp_avg` and
    `exp_avg_sq` in float32. With FSDP2, each rank has the state of its own rows, and a saved state loads with another
    number of ranks. Sharded parameters with one dimension have float32 moments.

    The work space of a step does not grow with the parameters. Weights of low precision are updated in float32. Equal
    gradients give equal bits, so replicas stay equal. A step reads nothing back from the device, but on XLA, where
    torch_xla reinterprets bits on the host.

    Args:
        params: parameters or groups.
        lr: learning rate, a number or a tensor.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        min_8bit_size: parameters with fewer elements have float32 moments. Groups may set their own, which counts when
            a state is created.

    Raises:
        ValueError: an argument is out of range, or a parameter is complex, or sharded in another way than by rows.
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
        super().__init__(params, {**adam_options(lr, betas, eps, weight_decay), "min_8bit_size": min_8bit_size})

    @classmethod
    def from_arguments(cls, params: Iterable[dict[str, Any]], args: Any) -> AdamW8bit:
        """Build from training arguments; `optim_args` may set min_8bit_size. Each group has its own weight decay.

        Raises:
            ValueError: `optim_args` has an unknown option.
        """
        options = read_options(args.optim_args, {"min_8bit_size": whole_number}, "adamw_8bit")
        return cls(params, **adam_arguments(args), **options)

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that cannot be updated."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        check_least_size(group)
        check_real(group["params"], type(self).__name__)
        sharded_parameters(group["params"], type(self).__name__, takes=True, instead="")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Returns the result of `closure`, if one is given."""
        result, rule = run_closure(closure), Adam8bitRule()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                check_gradient(parameter, parameter.grad)
                state, gradient = self.state[parameter], local_part(parameter.grad)
                if parameter.numel() == 0:
                    continue  # its state stays empty
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float64)  # on the CPU, where reading it costs nothing
                    shards, dtype = shards_of(parameter), computing_dtype(parameter)
                    has_codes = is_to_be_quantized(gradient, group, shards)
                    rule.start(state, gradient if has_codes else gradient.to(dtype), group, shards)
                state["step"] += 1
                update_in_pieces(rule, local_part(parameter), state, group, gradient)
        return result

    expected_bytes = optimizer_bytes

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with DTensors for sharded parameters; `state` itself has this rank's parts."""
        return in_layout(super().state_dict(), self.param_groups, is_divided)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as copies; moments of a state of torch's AdamW are rounded to the nearest codes.

        Raises:
            ValueError: its shapes or its kind of optimizer are different; nothing is changed then.
        """
        complete, states = checked_state_dict(state_dict, self.param_groups, _check_saved)
        # torch would convert codes to their parameter's dtype.
        super().load_state_dict({**complete, "state": {}})
        load_states(self, states, _copies, is_divided)
        convert_loaded_state(self, state_dict["param_groups"])


def _copies(saved: dict[str, Any], parameter: torch.Tensor, _group: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(parameter.device, copy=True) for name, value in saved.items() if name.startswith("exp_avg")}


def _check_saved(saved: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
    check_shapes(saved, {"exp_avg": parameter.shape, "exp_avg_sq": parameter.shape}, parameter, AdamW8bit.__name__)
