"""Train one replica of a model in every process, with gradients averaged over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn

from tr_dist.base import Ranks, common_options
from tr_dist.environment import rank_device, read_environment
from tr_dist.replica import Replica, check_replicas_equal, check_trainable, moved


class DDP(Ranks):
    """Data parallel training: every rank holds the whole model and works on its own part of each batch.

    The constructor joins the process group that the launcher's environment describes (see
    `tr_dist.read_environment`) and checks that rank, world size and device match it. Without a
    launcher this process trains alone. Each rank computes on the CUDA device whose index is LOCAL_RANK, or on the
    CPU.

    Call, in this order: `prepare` once, before the optimizer is built; for each micro-batch `accumulate`, and inside
    it `autocast` around the forward, then `backward`; for each step `clip_grad_norm` (optional) and `step`; at
    the end `close`, with `failed=True` after an exception. As a context manager it closes itself.

    Args:
        precision: `no`, `bf16`, or `fp16` with loss scaling.
        find_unused_parameters: search the graph in every step for parameters that do not contribute to the loss.
            Without it such a parameter is an error.
        bucket_cap_mb: MiB of gradients in one all-reduce; None is torch's default.
        broadcast_buffers: copy the buffers of rank 0 to all ranks before the first step and after each.
        static_graph: the graph and the set of used parameters never change.
        backend: the backend for collectives; None takes gloo on the CPU and NCCL on CUDA.
        timeout_s: seconds to wait for other ranks, when joining and in each collective.
        hang_timeout_s: seconds without progress of any rank after which all are ended; see `ProcessGroup`.
        use_cpu: compute on the CPU even if there is CUDA.

    Attributes:
        device: the device of this process.
        rank: number of this process among all, from 0.
        local_rank: number of this process on its machine, from 0.
        world_size: number of processes.

    Raises:
        ValueError: an argument or the environment does not fit this machine.
        ConnectionError: the ranks did not find each other.
        RuntimeError: a process group exists and differs from the environment.
    """

    forward_is_collective = False
    _last: ref[Replica] | None = None  # the last result of `prepare`

    def __init__(
        self,
        *,
        precision: str = "no",
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        static_graph: bool = False,
        backend: str | None = None,
        timeout_s: float = 1800.0,
        hang_timeout_s: float | None = None,
        use_cpu: bool = False,
    ) -> None:
        self._wrapping = {
            "find_unused_parameters": find_unused_parameters,
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "static_graph": static_graph,
        }
        environment = read_environment()
        device = rank_device(environment, use_cpu=use_cpu)
        super().__init__(
            environment,
            device,
            precision=precision,
            backend=backend,
            timeout_s=timeout_s,
            hang_timeout_s=hang_timeout_s,
        )

    @classmethod
    def from_arguments(cls, args: Any) -> DDP:
        """Build from the training arguments that concern it: `bf16`, `fp16`, `use_cpu` and `ddp_*`.

        `ddp_find_unused_parameters=None` is False, `ddp_broadcast_buffers=None` True, `ddp_static_graph=None`
        False.
        """
        return cls(
            find_unused_parameters=bool(args.ddp_find_unused_parameters),
            bucket_cap_mb=args.ddp_bucket_cap_mb,
            broadcast_buffers=args.ddp_broadcast_buffers is not False,
            static_graph=bool(args.ddp_static_graph),
            **common_options(args),
        )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Move the model to the device, copy the weights of rank 0 to all ranks, and return the module to train.

        Collective. Which parameters are frozen is fixed by this call. A model that was prepared before, and in which
        a module or parameter was replaced, can be prepared again until it was trained.

        Raises:
            ValueError: the model has no trainable parameter, is wrapped already, has no values yet (meta
                device) or is on another accelerator than this rank's; or it was trained already.
        """
        check_trainable(model, self.device)
        self._refuse_trained(model)
        # device_ids stays None: with it every forward would search its arguments for tensors to move.
        replica = Replica(moved(model, self.device), **self._wrapping)
        self._last = ref(replica)
        return replica

    def _refuse_trained(self, model: nn.Module) -> None:
        """Raise `ValueError` if a model that is to be prepared again was trained already."""
        earlier = None if self._last is None else self._last()
        if earlier is not None and self.unwrap(earlier) is model and earlier.has_buckets:
            raise ValueError(
                f"modules or parameters of {type(model).__name__} were replaced after it was trained: its gradients "
                "would be averaged twice; build a new Trainer (or strategy) with the model as it is now"
            )

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        replica = _replica_in(model)
        return model if replica is None else replica.module

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[object]:
        """Return the context for forward and backward of one micro-batch; without `sync` gradients add up locally.

        The first call compares the ranks' weights: it is collective, and syncs once.

        Raises:
            TypeError: `model` is not the result of `prepare`.
            RuntimeError: the ranks' weights differ before the first step; or, on exit with `sync`, the
                backward has not averaged all gradients over the ranks.
        """
        replica = self._prepared(model, Replica)
        if not replica.compared:
            check_replicas_equal(replica.module, self._group)
            replica.compared = True
        return _averaging(replica) if sync else replica.no_sync()

    @contextmanager
    def accumulate_fused(self, model: nn.Module, *, last: bool) -> Iterator[None]:
        """Surround one micro-batch whose gradients an optimizer consumes in the backward pass, and averages itself.

        At the end of a step all ranks get the buffers of rank 0, as they do where gradients are averaged here.
        """
        with self.accumulate(model, sync=False):
            yield
        if last:
            self._prepared(model, Replica).share_buffers()

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Scale the gradients so that their total 2-norm is at most `max_norm`; None measures without scaling.

        Call it at most once a step, after the last micro-batch.

        Returns:
            The norm before clipping, a scalar tensor on the device; no sync.
        """
        replica = _replica_in(model)
        parameters = list(model.parameters()) if replica is None else replica.all_parameters
        return self._clip(parameters, optimizer, max_norm)


def _replica_in(model: nn.Module) -> Replica | None:
    """Return the replica in a prepared model, also from under `torch.compile`."""
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, Replica) else None


@contextmanager
def _averaging(replica: Replica) -> Iterator[None]:
    replica.expect_averaging()
    yield
    replica.check_averaged()  # not after an exception, which is the better message
    replica.share_buffers()
