"""Fira: GaLore's update, plus the rest of the gradient, scaled as the projection is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch

from tr_optim.engine.checks import all_or_nothing
from tr_optim.engine.norm_growth import NormGrowthLimiter, scaled_norm, scaling
from tr_optim.engine.projected import ProjectedOptimizer
from tr_optim.engine.settings import ProjectionOptions, check_full_gradient_group
from tr_optim.engine.updates import BackProjection, ProjectedUpdate, Sums
from tr_optim.moments.adam import AdamDirection, adam_options
from tr_optim.projection.basis import Basis


class FiraAdamW(ProjectedOptimizer):
    r"""AdamW in a low-rank subspace, and gradient descent with the same step sizes in all other directions.

    A step applies GaLore's update P N (see `GaLoreAdamW`) and the rest of the gradient, outside the projection. The
    rest's columns are scaled as AdamW scales those of the projection. From the left, m <= n, P has shape `m x r`::

        R = P^T G,  N = AdamW's update of R
        s_j = |N_j| / |R_j| for each column j
        S = (G - P R) diag(s)                             limited: |S_t| <= norm_growth |S_(t-1)|
        W = (1 - lr wd) W - lr (scale P N + S)

    From the right it scales rows.

    Source: Chen et al., "Fira: Can we achieve full-rank training of LLMs under low-rank constraint?" (2024), its
    norm-based scaling and norm-growth limiter. Deviations: bases and moments as of `GaLoreAdamW`, with its options; a
    column whose projection is zero gets no S; and the norm that the limiter stores (see `NormGrowthLimiter`). The paper
    has no `scale`; its value is 1.

    The limiter replaces clipping. Both together are allowed: the size of a gradient cancels in S and nearly in N, so
    clipping changes little more than its weight in the moments.

    State of a projected `m x n` parameter: that of `GaLoreAdamW` and `scaled_norm`, 4 bytes: `4 (m r + 2 r n) + 12`
    bytes, for 4096 x 11008 and r = 128 that is 12.8 MiB. Stacks of matrices have one more dimension in front.

    The update needs the whole gradient. `step` reads it from `.grad`. `immediate` applies and frees it in `backward`;
    with accumulation it keeps the sums of all gradients until the last micro-batch. `deferred` keeps projections only,
    so it is not available. Updating a matrix takes one more of its size, G - P R.

    With FSDP2's `fully_shard`, each rank updates its own rows of a matrix. Only `method="svd"` gathers a gradient, for
    a new basis. Bases, moments and their exchanges are those of `GaLoreAdamW`. `scaled_norm` is the same on all ranks,
    and needs a sum of one number. `step` exchanges that of several matrices together; their rests are then in memory at
    once, up to 16 MiB and one more. `immediate` exchanges each alone. Of stacks each rank has whole matrices.
    `state_dict` has DTensors, which load with another number of ranks.

    Args:
        params: parameters or groups. Groups with a `rank` are projected: `{"params": matrices, "rank": 128,
            "update_proj_gap": 200, "scale": 1.0, "proj_type": "std"}`.
        lr: learning rate, a number or a tensor.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
        weight_decay: share of the weights, times the learning rate, that each step subtracts.
        rank: directions; None for no projection. More than the shorter side are that side's length.
        update_proj_gap: steps from one basis of a matrix to its next.
        scale: factor of the projected update P N.
        proj_type: `std` projects the shorter side, `reverse_std` the longer, `left` and `right` that one.
        norm_growth: greatest growth of the norm of S from one step to the next; None for no limit.
        mode: `step` or `immediate`.
        method: `subspace` iteration or `svd`.
        rotate_moments: carry moments over to a new basis.
        stagger: let matrices take turns in finding a new basis.
        seed: of random starts.
        stochastic_rounding: round weights of low precision up or down at random, so that small updates are not lost.
        compat: `fira` gives the results of the package of that name: svd, moments as they are, all bases in the same
            steps, eps and the limiter before the bias correction, weight decay after the update, and P R times `scale`
            subtracted from G.
        **projection: the other arguments; `tr_optim.engine.settings.Projection` has their defaults.

    Raises:
        ValueError: an argument is out of range, or a parameter cannot be projected.
    """

    _takes, _compat = ProjectionOptions, "fira"

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        scale: float = 1.0,
        norm_growth: float | None = 1.01,
        method: str = "subspace",
        **projection: Unpack[ProjectionOptions],
    ) -> None:
        options = {**adam_options(lr, betas, eps, weight_decay), "norm_growth": norm_growth}
        settings = self._settings(projection, needs_whole=True, scale=scale, method=method)
        as_upstream = settings.compat is not None
        rule, returning = AdamDirection(as_upstream=as_upstream), WithResidual(as_upstream=as_upstream)
        super().__init__(params, options, rule, settings, returning=returning)

    @all_or_nothing
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuse parameters that cannot be projected."""
        super().add_param_group(param_group)
        check_full_gradient_group(self.param_groups[-1], type(self).__name__, {})


class WithResidual:
    """The update, projected back, and the rest of the gradient, scaled as the rule scales the projection: Fira's.

    Args:
        as_upstream: limit norms before the bias correction, and take `scale` times the projection from the gradient.
    """

    needs_whole = True

    def __init__(self, *, as_upstream: bool = False) -> None:
        self._as_upstream = as_upstream
        self._limit = NormGrowthLimiter(before_correction=as_upstream)
        self._back = BackProjection()

    def subtract(self, made: ProjectedUpdate) -> Sums:
        """Subtract both, and leave the gradient as it is."""
        basis, group, projected, whole = made.basis, made.group, made.projected, made.whole
        assert projected is not None
        assert whole is not None
        dim, rate = -2 if basis.left is not None else -1, group["lr"]
        ratio = scaling(made.update, projected, dim)
        rest = _rest(whole, projected, basis, group["scale"] if self._as_upstream else 1.0)
        norm = yield from scaled_norm(ratio, rest, dim, made.parts)
        factor = self._limit(norm, made.state, group)[..., None, None]
        made.weights.addcmul_(rest, ratio * factor * rate, value=-1)
        made.update.mul_(rate)
        yield from self._back.subtract(made)


def _rest(whole: torch.Tensor, projected: torch.Tensor, basis: Basis, share: float) -> torch.Tensor:
    """Return a gradient without a share of what is in the basis, a new tensor."""
    subtract = torch.addmm if whole.dim() == 2 else torch.baddbmm
    if basis.left is not None:
        return subtract(whole, basis.left, projected, alpha=-share)
    assert basis.right is not None
    return subtract(whole, projected, basis.right.mT, alpha=-share)
