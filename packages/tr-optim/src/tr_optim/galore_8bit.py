"""GaLore with moments in 8 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch

from tr_optim.engine.checks import all_or_nothing
from tr_optim.engine.settings import GaLoreOptions
from tr_optim.galore import GaLoreAdamW
from tr_optim.moments.adam import Adam8bitRule, check_least_size, convert_loaded_state


class GaLoreAdamW8bit(GaLoreAdamW):
    r"""AdamW in low-rank subspaces that follow the gradients, with moments in 8 bits.

    As `GaLoreAdamW`, whose equations, deviations, modes and arguments it has. Between steps M and V are codes of 8
    bits, each block of 256 elements of a row with a scale of its own::

        M', V' = codes of M, V;  in the next step  M = s l(M'), V = s l(V')

    with levels l as `tr_optim.AdamW8bit` describes. The basis and the weights stay as they are. A new basis rotates
    the moments that the codes stand for.

    Source: Zhao et al., "GaLore" (2024), section 4.3, with the blocks of Dettmers et al., "8-bit optimizers via
    block-wise quantization" (2022). Deviations: see `GaLoreAdamW` and `AdamW8bit`. galore-torch's 8-bit class does not
    train projections of less than 4096 elements, nor biases that begin with 0, with current bitsandbytes; here those
    have float32 moments and train.

    State of a projected `m x n` parameter, std, m <= n: `basis_left` `m x r` float32, `exp_avg` int8 and `exp_avg_sq`
    uint8 `r x n`, `exp_avg_scale` and `exp_avg_sq_scale` float32 `r x ceil(n / 256)`, and `step`: `4 m r + 2.03 r n`
    bytes against `4 m r + 8 r n` of `GaLoreAdamW`; for 4096 x 11008 and r = 128 that is 4.7 against 12.8 MiB. For m > n
    it is `m x r`, and `m x ceil(r / 256)` of scales. Other parameters have the state of `AdamW8bit`, and of a stack of
    matrices each is a row. What is kept of gradients is as of `GaLoreAdamW`.

    Because a number may fall to either side of a threshold by its last bit, what is equal but for rounding with
    `GaLoreAdamW`, as micro-batches and one big batch, is equal but for single codes here. All modes, all ranks and a
    resumed run have the same bits.

    Args:
        params: as of `GaLoreAdamW`, and so are those that follow, up to `weight_decay`, and all not named here.
        lr: see there.
        betas: see there.
        eps: see there.
        weight_decay: see there.
        min_8bit_size: projected gradients, and parameters without a projection, with fewer elements have float32
            moments. It is of groups too, for states that are begun.
        **options: what else `GaLoreAdamW` takes.

    Raises:
        ValueError: an argument is out of range, or a parameter cannot be projected.
    """

    _rule_type = Adam8bitRule

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        min_8bit_size: int = 4096,
        **options: Unpack[GaLoreOptions],
    ) -> None:
        given: list[Any] = list(params)
        groups = given if not given or isinstance(given[0], dict) else [{"params": given}]
        groups = [{"min_8bit_size": min_8bit_size, **group} for group in groups]
        super().__init__(groups, lr, betas, eps, weight_decay, **options)
        self.defaults["min_8bit_size"] = min_8bit_size

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that cannot be projected."""
        super().add_param_group(param_group)
        check_least_size(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state as copies; moments of a `GaLoreAdamW` state are rounded to the nearest codes.

        Raises:
            ValueError: its shapes or its kind of projection are different.
        """
        super().load_state_dict(state_dict)
        convert_loaded_state(self, state_dict["param_groups"])
