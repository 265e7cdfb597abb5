"""Average over the ranks what each has kept of its own gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from tr_optim.engine.hooks import Consume

_BUCKET_ELEMENTS = 2**22


class Collectives(Protocol):
    """Who this process is among the others; the strategies of tr-core and tr-dist are such."""

    rank: int
    world_size: int

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, on every rank, bit for bit the same."""
        ...


class Averaging:
    """Means over the ranks.

    Args:
        collectives: how values travel between them.
    """

    def __init__(self, collectives: Collectives) -> None:
        self._collectives = collectives
        self.world_size = collectives.world_size

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the mean of a contiguous tensor over all ranks, a new one."""
        return self._collectives.sum(tensor) / self.world_size

    def average_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Replace tensors by their means; many travel together. Every rank gives the same shapes in the same order."""
        bucket: list[torch.Tensor] = []
        size = 0
        for tensor in tensors:
            if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.numel() > _BUCKET_ELEMENTS):
                self._average_bucket(bucket)
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.numel()
        if bucket:
            self._average_bucket(bucket)

    def _average_bucket(self, bucket: list[torch.Tensor]) -> None:
        mean = self(torch.cat([tensor.reshape(-1) for tensor in bucket]))
        for tensor, part in zip(bucket, mean.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


class FixedOrder:
    """Handle gradients in one order on all ranks, whatever the order in which a backward pass has them.

    What is exchanged while one is handled then meets its counterpart. One that comes early waits for those before it.

    Args:
        order: the parameters whose gradients come, in the order to handle them in.
        take: what handles one.
    """

    def __init__(self, order: Sequence[torch.Tensor], take: Consume) -> None:
        self._order, self._take = list(order), take
        self._next = 0
        self._waiting: dict[int, torch.Tensor] = {}
        self._ids = {id(parameter) for parameter in self._order}

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return id(parameter) in self._ids

    def lacks(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient has not come yet."""
        return id(parameter) not in self._waiting and id(parameter) in {id(p) for p in self._order[self._next :]}

    def put(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Handle a gradient, and those that waited for it; or have it wait."""
        self._waiting[id(parameter)] = gradient
        while self._next < len(self._order) and id(self._order[self._next]) in self._waiting:
            following = self._order[self._next]
            self._next += 1
            self._take(following, self._waiting.pop(id(following)))

    def finish(self) -> None:
        """Make sure that all have come.

        Raises:
            RuntimeError: one has not.
        """
        if self._next < len(self._order):
            raise RuntimeError(missing_gradient([self._order[self._next]]))


def missing_gradient(parameters: Sequence[torch.Tensor]) -> str:
    """Return what is wrong where parameters got no gradient on this rank."""
    shapes = ", ".join(str(tuple(parameter.shape)) for parameter in parameters[:5])
    return (
        f"{len(parameters)} trainable parameters got no gradient on this rank in the step's backward passes (shapes "
        f"{shapes}), so that the others would wait for it; use them in the loss, or freeze them with "
        "requires_grad_(False)"
    )
