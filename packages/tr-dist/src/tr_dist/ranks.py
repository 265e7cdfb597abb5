"""Share what every strategy over a process group does alike: exchange values, compute in a precision, leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch

from tr_dist.environment import LaunchEnvironment
from tr_dist.mixed_precision import MixedPrecision
from tr_dist.process_group import ProcessGroup


class Ranks:
    """This process among the ranks of a job, and the precision it computes in: the base of strategies.

    Args:
        environment: which process this is.
        device: where it computes.
        precision: `no`, `bf16`, or `fp16` with loss scaling.
        backend: what carries collectives; None takes gloo on the CPU and NCCL on CUDA.
        timeout_s: seconds to wait for other ranks, in joining and in each collective.

    Attributes:
        device: where this process computes.
        rank: number of this process among all, from 0.
        local_rank: number of this process on its machine, from 0.
        world_size: number of processes.
    """

    def __init__(
        self,
        environment: LaunchEnvironment,
        device: torch.device,
        *,
        precision: str,
        backend: str | None,
        timeout_s: float,
    ) -> None:
        self.device = device
        self._precision = MixedPrecision(precision, device)
        self._group = ProcessGroup(environment, device, backend=backend, timeout_s=timeout_s)
        self.rank, self.local_rank = self._group.rank, self._group.local_rank
        self.world_size = self._group.world_size

    def autocast(self) -> AbstractContextManager[object]:
        """Surround a forward pass and its loss: mixed precision, if it was asked for."""
        return self._precision.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a scalar loss, scaling it first under float16."""
        self._precision.backward(loss)

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients. Returns False where a float16 overflow left the step out, else True.

        All ranks decide alike, for they hold the same averaged gradients. Only float16 reads from the device.

        Args:
            optimizer: what applies them.
            skip: scalar on the device, the same on all ranks; where it is not 0, parameters and optimizer state stay as
                they are. Optimizers other than torch's fused ones have it read from the device.
        """
        return self._precision.step(optimizer, skip=skip)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over all ranks, on every rank; the argument stays as it is. Reads nothing back."""
        return self._group.sum(tensor)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's `tensor` of shape `(n, ...)` along dimension 0, in rank order. Not for the step.

        Raises:
            ValueError: the ranks' shapes or dtypes differ, or the tensor has no dimension.
        """
        return self._group.gather(tensor)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value`, in rank order. A host-side exchange: not for the step."""
        return self._group.gather_objects(value)

    def agree(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begin to find the largest of each of `values` over all ranks and return what waits; the device has no part.

        All ranks begin in the same order. Begun in one step and read in the next, it costs no waiting.
        """
        return self._group.agree(values)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._group.barrier()

    def close(self, *, failed: bool = False) -> None:
        """Leave the process group if this object joined it; a second call does nothing.

        Args:
            failed: the run ends by an exception, so the other ranks may be gone: wait for nobody.
        """
        self._group.leave(failed=failed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(failed=kind is not None)
