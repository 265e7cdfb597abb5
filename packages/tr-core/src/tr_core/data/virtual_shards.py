"""Divide a step into shards whose number does not depend on that of the processes (`elastic`).

A step on `virtual_shards` shards is that of as many ranks. A process computes several of them, one after the other:
those whose number has its rank as the remainder. So whatever is computed is the same on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from tr_args import TrainingArguments
from tr_core.protocols import Collectives
from tr_core.random_state import derive_seed, separate_randomness

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")
_GRID = 2.0**32


@dataclass(frozen=True)
class VirtualShards:
    """The shards of a step that one rank computes.

    Attributes:
        own: their numbers, from 0, in the order in which they are computed.
        number: of all shards.
        micro_batches: of a shard in a full step.
        takes_part: whether this rank computes a batch of weight 0 where others compute one shard more, as in an
            evaluation, whose batches are gathered.
    """

    own: range
    number: int
    micro_batches: int = 1
    takes_part: bool = False

    @classmethod
    def of(cls, args: TrainingArguments, collectives: Collectives, *, trains: bool = True) -> VirtualShards | None:
        """Return the shards of this rank; None unless the arguments ask for `elastic`."""
        if args.elastic is None:
            return None
        number = replicas(args, collectives)
        own = range(collectives.rank, number, collectives.world_size)
        if trains:
            return cls(own, number, args.gradient_accumulation_steps)
        return cls(own, number, takes_part=len(own) * collectives.world_size < number)

    @property
    def turns(self) -> int:
        """How many micro-batches this rank computes for one of each shard."""
        return len(self.own) + self.takes_part

    def seeding(
        self, compute: Callable[[_Given], _Result], seed: int, step: int, size: int, device: torch.device
    ) -> Callable[[_Given], _Result]:
        """Return a function that computes a step's micro-batches, one a call, each with random numbers of its own.

        They follow from seed, step, shard and place in the shard alone. The generators go on from where they were.

        Args:
            compute: computes one micro-batch.
            seed: that of the run.
            step: number of completed steps.
            size: micro-batches of the step on this rank.
            device: where it is computed.
        """
        each, places = size // len(self.own), iter(range(size))

        def seeded(batch: _Given) -> _Result:
            shard, place = divmod(next(places), each)
            with _numbers_of(derive_seed(seed, step, self.own[shard], place), device):
                return compute(batch)

        return seeded


@contextmanager
def _numbers_of(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of host and device in a block, and restore them after it."""
    with separate_randomness(seed):
        if device.type == "cpu":
            yield
            return
        generators: Any = torch.get_device_module(device)
        before = generators.get_rng_state()
        generators.manual_seed(seed)
        try:
            yield
        finally:
            generators.set_rng_state(before)


def replicas(args: TrainingArguments, collectives: Collectives) -> int:
    """Return how many micro-batches of other samples a step computes side by side: ranks, or virtual shards."""
    return (args.virtual_shards or 1) if args.elastic else collectives.world_size


def on_grid(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in float64, rounded to multiples of 2**-32.

    Sums of such numbers below 2**21 are exact, so they do not depend on the order in which they are added.
    """
    return (value.double() * _GRID).round() / _GRID
