"""What every direction is in which several processes compute a sample together."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh


class Direction:
    """A way to divide the computation of a sample over `size` processes. A class of it, in a file of its own, says how.

    The strategy makes those above size 1, and calls them in the order of its own list.

    Attributes:
        name: of the direction, as in `parallelism_config`: `tp` for `tp_size`.
        size: number of processes.
    """

    name: str
    size: int

    def divide(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Divide the model in place, before it is divided over those that compute other samples.

        Args:
            model: as the user gave it, or as the direction before this one left it.
            mesh: of all processes, by `pp`, `replicate`, `shard` and `tp`, or a slice of it.

        Raises:
            ValueError: it cannot be divided so; the message says what can be done.
        """

    def finish(self, model: nn.Module) -> None:
        """Do what is left to do once the model is divided over those that compute other samples."""

    def close(self) -> None:
        """Undo what outlives the model."""


def sizes_that_divide(*numbers: int) -> str:
    """Return the sizes above 1 that divide each of some numbers, as text."""
    common = math.gcd(*numbers)
    return ", ".join(str(size) for size in range(2, common + 1) if common % size == 0) or "no other sizes"


def sizes_of(args: Any) -> dict[str, int]:
    """Return the sizes of `parallelism_config`; empty if there are none."""
    return args.parallelism_config or {}


def far_neighbours(near: int, on_machine: int | None, started: int) -> str:
    """Return a warning if processes that exchange in every layer are on several machines; empty if not, or unknown.

    Args:
        near: number of processes in a row that compute a sample together: `sp_size` times `tp_size`.
        on_machine: number of processes on a machine.
        started: number of processes.
    """
    if near < 2 or not on_machine or on_machine >= started or on_machine % near == 0:
        return ""
    return (
        f"{near} processes in a row (sp_size x tp_size) exchange in every layer, and a machine has {on_machine}: some "
        f"of them are on two machines, whose network is slower; choose sizes whose product divides {on_machine} "
        f"({sizes_that_divide(on_machine)} do), or start a multiple of {near} processes on each machine"
    )
