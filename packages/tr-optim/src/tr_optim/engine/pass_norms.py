"""Norms of the gradients of one backward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tr_optim.engine.chunks import computing_dtype
from tr_optim.engine.norms import norm_of
from tr_optim.engine.shards import Shards, local_part, norm_of_parts, only_shards


class PassNorms:
    """Take the norm of each gradient as it comes, in float32 at least, and that of all at the end."""

    def __init__(self) -> None:
        self._of: dict[int, torch.Tensor] = {}
        self._joint: list[torch.Tensor] = []

    def add(self, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        """Take the norm of each parameter's gradient."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._of[id(parameter)] = norm_of(gradient)

    def add_joint(self, gradients: Sequence[torch.Tensor]) -> None:
        """Take the norm of several gradients of one dtype and device as one: a fixed cost for all of them."""
        joined = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self._joint.append(torch.linalg.vector_norm(joined, dtype=computing_dtype(joined)))

    def are_bad(self, parameters: Sequence[torch.Tensor], sharded: Mapping[int, Shards]) -> torch.Tensor:
        """Return whether gradients that were added are not finite, on their device.

        Args:
            parameters: one; or several of which all are in `sharded`, and that all ranks ask for together.
            sharded: those of which each rank has added its part, by id.

        Returns:
            A scalar, or of parts as many flags, equal on all ranks.
        """
        norms = [self._of[id(parameter)] for parameter in parameters]
        shards = sharded.get(id(parameters[0]))
        if shards is None:
            return ~norms[0].isfinite()
        return shards.sum((~torch.stack(norms).isfinite()).float()) > 0

    def total(self, parameters: Sequence[torch.Tensor], sharded: Mapping[int, Shards]) -> torch.Tensor:
        """Return the norm of all; where there are such parts, all ranks call it.

        Args:
            parameters: those whose gradients may have been added; their order is that of the sum, the same on all
                ranks.
            sharded: those of which each rank has added its part, by id.
        """
        parts: list[list[torch.Tensor]] = [[*self._joint], []]  # of whole gradients, and of parts
        for parameter in parameters:
            if id(parameter) in self._of:
                parts[id(parameter) in sharded].append(self._of[id(parameter)])
        device = local_part(parameters[0]).device if parameters else None
        whole = torch.linalg.vector_norm(
            torch.stack([norm.to(device) for norm in parts[0]] or [torch.zeros((), device=device)])
        )
        shards = only_shards(sharded)
        return whole if shards is None else torch.hypot(whole, norm_of_parts(parts[1], shards, device))


def either(first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
    """Return where one of two flags, or of two sets of them, is True; None is False."""
    if first is None or second is None:
        return second if first is None else first
    return first | second
