"""Train one replica of a model in every process, with gradients averaged over them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import ref

import torch
from torch import nn

from tr_dist.base import OnRanks, check_trainable, common_options
from tr_dist.environment import rank_device, read_environment
from tr_dist.replica import Replica, check_replicas_equal, moved


class GradientWait:
    """Adds up how long backward passes wait for the exchange of gradients, by what torch measures of some of them.

    torch measures the time from a backward's first all-reduce to its last, and how much of that the backward still
    computes. The difference is what a step waits. The first ten passes are measured, then each tenth on the CPU, and on
    another device, where a measurement waits for it, each hundredth, as torch does by itself.

    Args:
        replica: whose passes.

    Attributes:
        replica: a weak reference to the same.
    """

    def __init__(self, replica: Replica) -> None:
        self.replica = ref(replica)
        self._every = 10 if replica.device_type == "cpu" else 100
        replica._set_ddp_runtime_logging_sample_rate(self._every)
        self._measured, self._passes = 0, 0
        self._sum_s = self._mean_s = 0.0

    def take(self, replica: Replica) -> float | None:
        """Return the seconds since the last call; None if nothing was measured yet, or nothing is on this device."""
        known = replica._get_ddp_logging_data()
        exchange_ns = float(known.get("avg_backward_comm_time", 0))
        overlap_ns = float(known.get("avg_backward_compute_comm_overlap_time", 0))
        if exchange_ns <= 0:
            return None
        last = int(known.get("iteration", 0))  # the last measured pass, from 1; measured when the next begins
        measured = min(last, 10) + max(last // self._every - 10 // self._every, 0)
        if measured > self._measured:
            sum_s = max(exchange_ns - overlap_ns, 0.0) * measured / 1e9
            self._mean_s = max(sum_s - self._sum_s, 0.0) / (measured - self._measured)
            self._measured, self._sum_s = measured, sum_s
        passes, self._passes = replica.num_averaged - self._passes, replica.num_averaged
        return passes * self._mean_s


class DDP(OnRanks):
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

    _last: ref[Replica] | None = None  # the last result of `prepare`
    _wait: GradientWait | None = None

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
        group = {"timeout_s": timeout_s, "hang_timeout_s": hang_timeout_s}
        super().__init__(environment, device, precision=precision, backend=backend, **group)

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
            check_replicas_equal(replica.module, self)
            replica.compared = True
        return _averaging(replica) if sync else replica.no_sync()

    def exchange_s(self, model: nn.Module) -> float | None:
        """Return for how many seconds since the last call backward passes waited for other ranks' gradients. No sync.

        It is None before the first of them, and with an optimizer that averages gradients itself.
        """
        replica = _replica_in(model)
        if replica is None or self.world_size == 1 or not replica.has_buckets:
            return None
        if self._wait is None or self._wait.replica() is not replica:
            self._wait = GradientWait(replica)
        return self._wait.take(replica)

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
