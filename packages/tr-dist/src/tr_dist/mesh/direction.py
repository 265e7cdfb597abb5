"""What every direction is in which several processes compute a sample together."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tr_dist.mesh.data_ranks import DataRanks


class Direction:
    """A way to divide the computation of a sample over `size` processes. A class of it, in a file of its own, says how.

    The strategy makes those above size 1, and calls them in the order of its own list.

    Attributes:
        name: of the direction, as in `parallelism_config`: `tp` for `tp_size`.
        size: number of processes.
        replicas_a_copy: number of replicas that hold the model once, together.
        computes: what a process computes of a sample, for errors.
        seen: how often calls of attention were divided, those that are found by a function mode as `torch`.
    """

    name: str
    size: int
    computes: str
    replicas_a_copy = 1
    seen: Counter[str] = Counter()

    def join(self, ranks: torch.Tensor, device: torch.device, among: Callable[[list[list[int]]], DataRanks]) -> None:
        """Make the groups of processes that the direction needs beside those of the mesh. Collective over the job.

        Args:
            ranks: of the job, by stage, replica, shard, piece of a sequence, and part of matrices.
            device: of this process.
            among: makes this process's place among the ranks of its group, from the groups of all.

        Raises:
            ValueError: the size does not fit the others.
        """

    def check(self, model: nn.Module) -> None:
        """Raise `ValueError` if the model cannot be divided so, with what can be done. Before anything is divided."""

    def divide(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Divide the model in place, before it is divided over those that compute other samples.

        Args:
            model: as the user gave it, or as the direction before this one left it.
            mesh: of all processes, by `pp`, `replicate`, `shard` and `tp`, or a slice of it.

        Raises:
            ValueError: it cannot be divided so; the message says what can be done.
        """

    def apart(self) -> list[tuple[nn.Module, DeviceMesh]]:
        """Return the modules that are divided over other processes than the rest of the model, and over which."""
        return []

    def finish(self, model: nn.Module) -> None:
        """Do what is left to do once the model is divided over those that compute other samples."""

    def metrics(self, total: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what it measured since the last call, scalars on the device; see `Mesh.window_metrics`.

        Args:
            total: sums a tensor over those that compute other samples.
        """
        return {}

    def in_backward(self) -> AbstractContextManager[object]:
        """Return the context of a backward pass, in which activations may be computed again."""
        return nullcontext()

    def close(self) -> None:
        """Undo what outlives the model."""


class NotGathered:
    """Stands for an output of which each process has a part; to read it is an error, which says `why`."""

    why: str

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self.why)

    @classmethod
    def __torch_function__(cls, *arguments: Any) -> Any:
        raise TypeError(cls.why)


@contextmanager
def computing_with(module: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Let a module compute with tensors in place of some of its own parameters in a block."""
    own = dict(module._parameters)
    module._parameters.update(parameters)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module._parameters.update(own)


@contextmanager
def as_in_evaluation(model: nn.Module) -> Iterator[None]:
    """Set all modules to evaluation in a block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in modes:
            module.training = False
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def sizes_that_divide(*numbers: int) -> str:
    """Return the sizes above 1 that divide each of some numbers, as text."""
    common = math.gcd(*numbers)
    return ", ".join(str(size) for size in range(2, common + 1) if common % size == 0) or "no other sizes"


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern fits, in which `*` stands for one word of a name."""
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return [name for name in names if expression.fullmatch(name)]


def sizes_of(args: Any) -> dict[str, int]:
    """Return the sizes of `parallelism_config`; those that are not set are 1."""
    return defaultdict(lambda: 1, args.parallelism_config or {})


def far_neighbours(near: int, on_machine: int | None, started: int) -> str:
    """Return a warning if processes that exchange in every layer are on several machines; empty if not, or unknown.

    Args:
        near: number of processes in a row that compute a sample together, without stages.
        on_machine: number of processes on a machine.
        started: number of processes.
    """
    if near < 2 or not on_machine or on_machine >= started or on_machine % near == 0:
        return ""
    return (
        f"{near} processes in a row (cp_size, sp_size, tp_size) exchange in every layer, and a machine has "
        f"{on_machine}: some of them are on two machines, whose network is slower; choose sizes whose product divides "
        f"{on_machine} ({sizes_that_divide(on_machine)} do), or start a multiple of {near} processes on each machine"
    )
