"""Norms of the gradients of one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from tr_optim.engine.chunks import computing_dtype
from tr_optim.engine.shards import local_part


class PassNorms:
    """Take the norm of each gradient as it comes, in float32 at least, and that of all at the end."""

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}
        self._joint: list[torch.Tensor] = []

    def add(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Take the norm of each parameter's gradient."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            dtype = computing_dtype(gradient)
            # Naming the dtype that a tensor has costs as much as a small norm.
            name_it = {} if dtype == gradient.dtype else {"dtype": dtype}
            self._of[id(parameter)] = torch.linalg.vector_norm(gradient, **name_it)

    def add_joint(self, gradients: Sequence[torch.Tensor]) -> None:
        """Take the norm of several gradients of one dtype and device as one: a fixed cost for all of them."""
        joined = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._joint.append(torch.linalg.vector_norm(joined, dtype=computing_dtype(joined)))

    def is_bad(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return whether a gradient that was added by itself is not finite, on its device."""
        return ~self._of[id(parameter)].isfinite()

    def total(
        self,
        parameters: Sequence[torch.Tensor],
        sharded: Collection[int],
        sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> torch.Tensor:
        """Return the norm of all.

        Args:
            parameters: those whose gradients may have been added; their order is that of the sum, the same on all
                ranks.
            sharded: ids of those of which each rank has added its part.
            sum_over_ranks: needed where there are such.
        """
        parts: list[list[torch.Tensor]] = [[*self._joint], []]  # of whole gradients, and of parts
        for parameter in parameters:
            if id(parameter) in self._of:
                parts[id(parameter) in sharded].append(self._of[id(parameter)])
        device = local_part(parameters[0]).device if parameters else None
        whole, divided = (
            torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms] or [torch.zeros((), device=device)]))
            for norms in parts
        )
        if not sharded or sum_over_ranks is None:
            return whole
        return (whole.square() + sum_over_ranks(divided.square())).sqrt()
