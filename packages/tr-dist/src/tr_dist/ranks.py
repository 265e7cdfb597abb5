"""Share what every strategy over a process group does alike: join it, exchange values, leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from tr_dist.environment import LaunchEnvironment
from tr_dist.on_device import OnDevice, precision_of
from tr_dist.process_group import ProcessGroup

Kind = TypeVar("Kind")


class Ranks(OnDevice):
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
        super().__init__(device, precision=precision)
        self._group = ProcessGroup(environment, device, backend=backend, timeout_s=timeout_s)
        self.rank, self.local_rank = self._group.rank, self._group.local_rank
        self.world_size = self._group.world_size

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

    def _prepared(self, model: nn.Module, kind: type[Kind]) -> Kind:
        """Return what `prepare` made of a model, also from under `torch.compile`.

        Raises:
            TypeError: `model` is something else.
        """
        inner = getattr(model, "_orig_mod", model)
        if not isinstance(inner, kind):
            raise TypeError(
                f"this needs the module that prepare() returned, not {type(model).__name__}: nothing would average its "
                "gradients over the ranks"
            )
        return inner


def options_of(args: Any) -> dict[str, Any]:
    """Return what training arguments say to every strategy over a process group, by the names of its constructor.

    These are `bf16` and `fp16`, `ddp_backend`, `ddp_timeout` and `use_cpu`.
    """
    return {
        "precision": precision_of(args),
        "backend": args.ddp_backend,
        "timeout_s": float(args.ddp_timeout),
        "use_cpu": args.use_cpu,
    }
