"""Make updates that need sums over ranks in step with each other, so that their sums travel together."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from itertools import chain

import torch

from tr_optim.engine.shards import Shards, shards_of

# What an update, or a part of one, gives before it goes on: tensors that are to be replaced by their sums over ranks.
Sums = Generator[list[torch.Tensor]]

# Numbers of this rank's parts of gradients whose updates wait for each other, from which they wait no longer.
_TOGETHER = 2**22


def make(updates: Sequence[Sums], shards: Shards | None) -> None:
    """Make updates to their ends; all ranks call it, with those of the same parameters in the same order.

    Args:
        updates: none of them has begun.
        shards: who adds up; None where nothing is to be added up.
    """
    going = list(updates)
    while going:
        given = [(update, next(update, None)) for update in going]
        going = [update for update, tensors in given if tensors is not None]
        tensors = list(chain.from_iterable(tensors or () for _, tensors in given))
        if tensors and shards is not None:
            shards.add_up(sorted(tensors, key=lambda tensor: tensor.itemsize))  # those of a dtype travel together


class Together:
    """Updates of parameters in shards, which wait for each other; those of whole parameters are made at once.

    What waits depends on shapes alone, so that all ranks exchange the same at the same time. It is no more than what
    the update of one more gradient takes, or 16 MiB of float32 numbers for each such tensor.
    """

    def __init__(self) -> None:
        self._waiting: list[Sums] = []
        self._shards: Shards | None = None
        self._count = 0

    def add(self, parameter: torch.Tensor, update: Sums) -> None:
        """Take a parameter's update."""
        shards = shards_of(parameter)
        if shards is None:
            make([update], None)
            return
        self._shards = shards
        self._waiting.append(update)
        self._count += -(-parameter.numel() // shards.count)
        if self._count >= _TOGETHER:
            self.finish()

    def finish(self) -> None:
        """Make those that wait."""
        waiting, self._waiting, self._count = self._waiting, [], 0
        make(waiting, self._shards)
