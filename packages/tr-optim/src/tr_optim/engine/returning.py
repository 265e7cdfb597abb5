"""Bring an update that was made of a projected gradient back to the weights."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from tr_optim.engine.shards import Shards
from tr_optim.engine.together import Sums
from tr_optim.projection.basis import Basis


class Returning(Protocol):
    """How a projected update changes the weights.

    Attributes:
        needs_whole: whether it is made of the gradient itself too, which must then be there when the update is applied.
    """

    needs_whole: bool

    def subtract(
        self,
        weights: torch.Tensor,
        update: torch.Tensor,
        basis: Basis,
        group: dict[str, Any],
        state: dict[str, Any],
        *,
        projected: torch.Tensor | None,
        whole: torch.Tensor | None,
        parts: Shards | None,
    ) -> Sums:
        """Subtract an update from the weights, in place, and give what is to be added up over the ranks before that.

        Args:
            weights: `(..., m, n)`, in the dtype that is computed in.
            update: what the rule makes of the projected gradient, times the learning rate; it may be changed.
            basis: that the gradient was projected on.
            group: the parameter's group.
            state: the parameter's state.
            projected: the projected gradient; None unless `needs_whole`.
            whole: the gradient; None unless `needs_whole`. It may be changed.
            parts: how rows are divided of a matrix of which `weights`, and what else has its rows, are this rank's;
                None where there are all.
        """
        ...


class BackProjection:
    """The update, projected back, times `scale`: GaLore's."""

    needs_whole = False

    def subtract(
        self,
        weights: torch.Tensor,
        update: torch.Tensor,
        basis: Basis,
        group: dict[str, Any],
        state: dict[str, Any],
        *,
        projected: torch.Tensor | None,
        whole: torch.Tensor | None,
        parts: Shards | None,
    ) -> Sums:
        """Subtract without a second matrix of the weights' size, and without sums over ranks."""
        yield from ()
        update = update.mul_(group["scale"])
        multiply = weights.addmm_ if weights.dim() == 2 else weights.baddbmm_
        if basis.left is not None and basis.right is not None:
            multiply(basis.left @ update, basis.right.mT, alpha=-1)
        elif basis.left is not None:
            multiply(basis.left, update, alpha=-1)
        elif basis.right is not None:
            multiply(update, basis.right.mT, alpha=-1)
