"""APOLLO: scale gradients by what AdamW does to random projections of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch

from tr_optim.engine.bases import PROJECTIONS, RandomBases
from tr_optim.engine.checks import all_or_nothing
from tr_optim.engine.norm_growth import NormGrowthLimiter, matrix_scaling, scaled_norm, scaling
from tr_optim.engine.projected import ProjectedOptimizer
from tr_optim.engine.settings import ProjectionOptions, check_full_gradient_group
from tr_optim.engine.updates import ProjectedUpdate, Sums
from tr_optim.moments.adam import AdamDirection, adam_options

SCALE_TYPES = ("channel", "tensor")


class APOLLOAdamW(ProjectedOptimizer):
    r"""Gradient descent with a step size for each channel or matrix, computed by AdamW in a low-rank space.

    A gradient G of shape `m x n`, m <= n, is projected on r random directions. AdamW keeps moments of the projection.
    The gradient itself is scaled by the factor by which AdamW changes the norm of the projection. P has shape `m x r`,
    and its numbers are drawn from N(0, 1/r) every `update_proj_gap` steps::

        R = P^T G
        M = b1 M + (1 - b1) R,  V = b2 V + (1 - b2) R^2
        N = (M / (1 - b1^t)) / (sqrt(V / (1 - b2^t)) + eps)
        s_j = |N_j| / |R_j| for each column j             (scale_type="channel", APOLLO)
        s   = |N| / |R|                                   (scale_type="tensor", APOLLO-Mini, with rank=1, scale=128)
        S = G diag(s)                                     limited: |S_t| <= norm_growth |S_(t-1)|
        W = (1 - lr wd) W - lr sqrt(scale) S

    For m > n, R = G Q, and channels are rows. There is no momentum in the weights' own space. With few directions, some
    channel's projection is small by chance, and its s_j is too large by the same factor. The limiter bounds the effect.

    `scale` has the meaning of apollo-torch, and its root is the paper's factor: 1 of APOLLO is `scale=1`, and sqrt(128)
    of APOLLO-Mini is `scale=128`.

    Source: Zhu et al., "APOLLO: SGD-like memory, AdamW-level performance" (2024), Algorithm 1, with the norm-growth
    limiter of Chen et al., "Fira" (2024). As there, moments stay as they are when the directions change. Deviations:
    a channel whose projection is zero is not scaled; and the norm that the limiter stores (see `NormGrowthLimiter`).

    The limiter replaces clipping. Both together are allowed: the size of a gradient cancels in S, so clipping changes
    only its weight in the moments.

    State of a projected `m x n` parameter, std, m <= n, in float32 also for weights of lower precision: `exp_avg` and
    `exp_avg_sq` `r x n`, `scaled_norm` and `step`: `8 r n + 12` bytes against `8 m n` of AdamW; for 4096 x 11008 that
    is 21.5 MiB with r = 256, and 86 KiB with r = 1, against 344 MiB. The directions are drawn again from the seed.
    With `proj="svd"` or `"subspace"` the state has `basis_left` `m x r` too. For m > n, `m x r` and `basis_right`
    `n x r`. Stacks of matrices have one more dimension in front. Other parameters have AdamW's state.

    The update needs the whole gradient. `step` reads it from `.grad`. `immediate` applies and frees it in `backward`;
    with accumulation it keeps the sums of all gradients until the last micro-batch. `deferred` keeps projections only,
    so it is not available.

    With FSDP2's `fully_shard`, each rank scales its rows of a matrix's gradient, with the directions that one process
    would have for them. Only `proj="svd"` gathers a gradient, for a new basis. From the right, each rank keeps its
    rows' moments, `2 r` numbers a row. From the left, all ranks keep the same `2 r n`, and projections, `r n`, are
    summed. `scaled_norm` is the same on all ranks, and needs a sum of one number, or of three from the right with
    `scale_type="tensor"`. `step` exchanges those of several matrices together, up to 16 MiB of a rank's gradients and
    one more; `immediate` exchanges each alone. Of stacks each rank has whole matrices, and exchanges nothing. On each
    rank the seed draws all rows of a matrix, for a moment `4 m r` bytes. `state_dict` has DTensors, which load with
    another number of ranks.

    Args:
        params: parameters or groups. Groups with a `rank` are projected: `{"params": matrices, "rank": 256,
            "update_proj_gap": 200, "scale": 1.0, "proj": "random", "proj_type": "std", "scale_type": "channel"}`, as
            for apollo-torch.
        lr: learning rate, a number or a tensor.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        rank: directions; None for no projection. More than the shorter side are that side's length.
        update_proj_gap: steps from one set of directions to the next.
        scale: the square of a factor of the update.
        proj: `random` directions, or those in which the gradient is large: by `svd`, or by `subspace` iteration (see
            `GaLoreAdamW`).
        proj_type: `std` projects the shorter side, `reverse_std` the longer, `left` and `right` that one.
        scale_type: whether each `channel` or the whole `tensor` has a step size.
        norm_growth: greatest growth of the scaled gradient's norm from one step to the next; None for no limit.
        mode: `step` or `immediate`.
        rotate_moments: carry moments over to a new basis, where `proj` is not `random`.
        stagger: let matrices take turns in finding a new basis, where `proj` is not `random`.
        seed: of the random directions.
        stochastic_rounding: round weights of low precision up or down at random, so that small updates are not lost.
        compat: `apollo-torch` gives the results of apollo-torch 1.0, but for the random numbers: eps before the bias
            correction, the limiter too, weight decay after the update, moments as they are with `proj="svd"`.
        **projection: the other arguments; `tr_optim.engine.settings.Projection` has their defaults.

    Raises:
        ValueError: an argument is out of range, or a parameter cannot be projected.
    """

    _takes, _compat = ProjectionOptions, "apollo-torch"

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        scale: float = 1.0,
        proj: str = "random",
        scale_type: str = "channel",
        norm_growth: float | None = 1.01,
        **projection: Unpack[ProjectionOptions],
    ) -> None:
        options = adam_options(lr, betas, eps, weight_decay)
        options |= {"proj": proj, "scale_type": scale_type, "norm_growth": norm_growth}
        settings = self._settings(projection, needs_whole=True, scale=scale)
        as_upstream = settings.compat is not None
        rule, returning = AdamDirection(as_upstream=as_upstream), ScaledGradient(as_upstream=as_upstream)
        super().__init__(params, options, rule, settings, RandomBases(settings), returning)

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse options that are not known, and parameters that cannot be projected."""
        super().add_param_group(param_group)
        choices = {"proj": PROJECTIONS, "scale_type": SCALE_TYPES}
        check_full_gradient_group(self.param_groups[-1], type(self).__name__, choices)


class ScaledGradient:
    """The gradient, scaled by what the rule does to the norm of its projection: APOLLO's.

    Args:
        as_upstream: limit norms before the bias correction.
    """

    needs_whole = True

    def __init__(self, *, as_upstream: bool = False) -> None:
        self._limit = NormGrowthLimiter(before_correction=as_upstream)

    def subtract(self, made: ProjectedUpdate) -> Sums:
        """Subtract without a second matrix of the weights' size, and leave the gradient as it is."""
        update, group, projected, whole = made.update, made.group, made.projected, made.whole
        assert projected is not None
        assert whole is not None
        is_left = made.basis.left is not None
        if group["scale_type"] == "channel":
            dim = -2 if is_left else -1
            ratio = scaling(update, projected, dim)
            norm = yield from scaled_norm(ratio, whole, dim, made.parts)
        else:
            ratio, norm = yield from matrix_scaling(update, projected, whole, made.parts, has_rows=not is_left)
        factor = self._limit(norm, made.state, group)[..., None, None]
        made.weights.addcmul_(whole, ratio * factor * (group["lr"] * group["scale"] ** 0.5), value=-1)
