"""GaLore: optimizers whose state, and in two modes whose gradients, are of low rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch

from tr_optim.engine.checks import all_or_nothing
from tr_optim.engine.projected import ProjectedOptimizer
from tr_optim.engine.settings import GaLoreOptions
from tr_optim.moments.adafactor import AdafactorRule, check_ranges, check_step_size
from tr_optim.moments.adam import (
    Adam8bitRule,
    AdamRule,
    adam_options,
    check_least_size,
    check_rates,
    convert_loaded_state,
)


class GaLoreAdamW(ProjectedOptimizer):
    r"""AdamW in low-rank subspaces that follow the gradients.

    A gradient G of shape `m x n` is projected on r directions in which it is large. AdamW keeps moments of the
    projection only, and their quotient is projected back. From the left, with P of shape `m x r`::

        R = P^T G
        M = b1 M + (1 - b1) R,  V = b2 V + (1 - b2) R^2
        N = (M / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps)
        W = (1 - lr wd) W - lr scale P N

    From the right, `R = G Q`. Every `update_proj_gap` steps a matrix gets a new P.

    Source: Zhao et al., "GaLore: Memory-efficient LLM training by gradient low-rank projection" (2024), Algorithm 2
    with the projection from one side of section 4.2. Deviations, each with an option that turns it off: P comes from
    one warm subspace iteration, not from a full singular value decomposition (`method`); moments are rotated into the
    new basis (`rotate_moments`); matrices get new bases in different steps (`stagger`). Without the first two a run is
    not reproducible: singular vectors have any sign, and a change of 1e-7 in the data changes the result by as much as
    training does.

    State of a projected `m x n` parameter, std, m <= n, in float32 also for weights of lower precision: `basis_left`
    `m x r`, `exp_avg` and `exp_avg_sq` `r x n`, and `step`: `4 (m r + 2 r n)` bytes against `8 m n` of AdamW; for
    4096 x 11008 and r = 128 that is 12.8 against 344 MiB. For m > n it is `basis_right` `n x r` and `m x r`. Stacks of
    matrices have one more dimension in front. Other parameters have AdamW's state.

    Between backward and step, `step` keeps all gradients. `deferred` keeps `r x n` of a matrix, and with accumulation
    the whole gradients of matrices that get a new basis in this step. `immediate` keeps nothing, and with accumulation
    the same as `deferred`. The gradients of other parameters are kept too.

    With FSDP2's `fully_shard`, no gradient is gathered, except by `method="svd"`: one matrix at a time, for its new
    basis. From the right, each rank projects its rows, and keeps their moments and the whole `basis_right`; only bases
    need exchanges, of `n x r`. From the left, each rank keeps its rows of `basis_left`, and all keep the same moments,
    `2 r n`; projections are summed once a step. Of stacks each rank has whole matrices. `basis_dtype` may be `int8` or
    `int4` for matrices projected from the right. `state_dict` has DTensors.

    Args:
        params: parameters or groups. Groups with a `rank` are projected: `{"params": matrices, "rank": 128,
            "update_proj_gap": 200, "scale": 0.25, "proj_type": "std"}`, as for galore-torch.
        lr: learning rate, a number or a tensor.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        rank: directions; None for no projection. More than the shorter side are that side's length.
        update_proj_gap: steps from one basis of a matrix to its next.
        scale: factor of a projected update.
        proj_type: `std` projects the shorter side, `reverse_std` the longer, `left` and `right` that one, `full` both.
        mode: `step` takes gradients from `.grad`, with any wrapper and scaler; `deferred` projects and frees each in
            `backward`, and `step` applies; `immediate` applies in `backward`.
        method: `subspace` iteration or `svd`.
        rotate_moments: carry moments over to a new basis.
        stagger: let matrices take turns in finding a new basis.
        seed: of random starts and sketches.
        reduction: what ranks exchange. `projected` gradients, with `deferred`: `r / m` of the bytes, and an estimated
            norm if one is requested. `whole` gradients, with `deferred` and `immediate`.
        refresh_from: the micro-batches that a new basis is found from. `all`: their sum, so that they equal one big
            batch; the whole gradients of matrices that get a basis are kept until the last one, in the first step those
            of all matrices. `first`: the first one, which keeps no whole gradient.
        exchange_dtype: what ranks of replicas exchange in `backward`: `float32`, or `bfloat16` in half the bytes, as
            DDP's `bf16_compress_hook`. Ranks stay equal bit for bit; sums have a relative error of up to 2^-8.
        refresh: `fixed` finds a matrix's basis every `update_proj_gap` steps; `lazy` doubles that gap with each refresh
            while bases hardly change, as Q-GaLore does (see `tr_optim.projection.refresh.LazyRefresh`).
        refresh_cosine: with `lazy`, mean cosine of successive bases from which the gap doubles; 1 is no change.
        refresh_window: refreshes that this mean is over.
        basis_dtype: what bases are kept in between steps: `float32`, `bfloat16`, `int8` or `int4`, in 4, 2, 1.02 or
            0.52 bytes a number instead of 4 (see `tr_optim.projection.encoded.EncodedBasis`). Gradients are projected
            and moments rotated with the stored bases. Q-GaLore's int8 weights are not supported.
        stochastic_rounding: round weights in bfloat16 or float16 up or down, so that small updates are not lost (see
            `tr_optim.engine.precision.Rounding`).
        compat: `galore-torch` gives the results of galore-torch 1.0: svd, moments as they are, all bases in the same
            steps, eps before the bias correction and weight decay after the update.
        **projection: the arguments from `rank` on; `tr_optim.engine.settings.Projection` has their defaults.

    Raises:
        ValueError: an argument is out of range, or a parameter cannot be projected.
    """

    _takes, _compat = GaLoreOptions, "galore-torch"
    _rule_type: type[AdamRule] = AdamRule

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **projection: Unpack[GaLoreOptions],
    ) -> None:
        options = adam_options(lr, betas, eps, weight_decay)
        rule = self._rule_type(as_galore_torch=projection.get("compat") is not None)
        super().__init__(params, options, rule, self._settings(projection))


class GaLoreAdafactor(ProjectedOptimizer):
    """Adafactor in low-rank subspaces that follow the gradients.

    As `GaLoreAdamW`, with Adafactor's update of the projection R in place of N: limited in its root mean square, times
    the learning rate, and with `beta1` kept, before it is projected back and multiplied by `scale`.

    Source: galore-torch 1.0, whose paper (see `GaLoreAdamW`) names Adafactor as the other rule; for the rule see
    `tr_optim.Adafactor`. Deviations as of `GaLoreAdamW`.

    State of a projected `m x n` parameter, std, m <= n: `basis_left` `m x r`, `exp_avg_sq_row` r, `exp_avg_sq_col` n,
    `step`, and with `beta1` `exp_avg` `r x n`: `4 (m r + r + n)` bytes without it, for 4096 x 11008 and r = 128 that is
    2.0 MiB.

    Args:
        params: parameters or groups, as of `GaLoreAdamW`.
        lr: learning rate; None with `relative_step`.
        eps: added to squared gradients; and the least root mean square that `scale_parameter` takes a parameter to
            have.
        clip_threshold: greatest root mean square of an update before the learning rate.
        decay_rate: negative; after t steps the second moment takes in `t ** decay_rate` of the newest squares.
        beta1: decay of a first moment of the updates; None keeps none.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        scale_parameter: multiply the learning rate by the parameter's root mean square.
        relative_step: take `min(1e-2, 1 / sqrt(step))` for the learning rate.
        warmup_init: with `relative_step`, begin with `1e-6 * step` instead of 1e-2.
        **projection: `rank` and all that follow it in `GaLoreAdamW`, as there.

    Raises:
        ValueError: an argument is out of range, contradicts another, or a parameter cannot be projected.
    """

    _takes, _compat = GaLoreOptions, "galore-torch"

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
        **projection: Unpack[GaLoreOptions],
    ) -> None:
        check_rates(lr, weight_decay)
        check_step_size(lr, relative_step, warmup_init)
        check_ranges(eps, clip_threshold, decay_rate, beta1)
        options = {"lr": lr, "eps": eps, "clip_threshold": clip_threshold, "decay_rate": decay_rate, "beta1": beta1}
        options |= {"weight_decay": weight_decay, "scale_parameter": scale_parameter}
        options |= {"relative_step": relative_step, "warmup_init": warmup_init}
        super().__init__(params, options, AdafactorRule(), self._settings(projection))


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
