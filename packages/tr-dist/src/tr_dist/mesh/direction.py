"""What every direction is in which several processes compute a sample together."""

from __future__ import annotations

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


def sizes_that_divide(number: int) -> str:
    """Return the sizes above 1 that divide a number, as text."""
    return ", ".join(str(size) for size in range(2, number + 1) if number % size == 0) or "no other sizes"


def sizes_of(args: Any) -> dict[str, int]:
    """Return the sizes of `parallelism_config`; empty if there are none."""
    return args.parallelism_config or {}
