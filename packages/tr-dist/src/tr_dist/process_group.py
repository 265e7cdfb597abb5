"""Join the ranks of a job in a process group, exchange values with them, and leave without hanging or aborting."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tr_dist.environment import ELASTIC_RUN, LaunchEnvironment
from tr_dist.hangs.places import names_of_exchanges
from tr_dist.hangs.watch import HangWatch, limits_of
from tr_dist.rendezvous import meeting_place, open_store
from tr_dist.shared_page import SharedPage, open_page
from tr_log.streams import flush_streams

# How long a group is kept alive after it was left, in seconds. gloo's worker threads need the interpreter's lock to
# release their last operation. If the interpreter finalizes at that moment, CPython unwinds the thread through a C++
# destructor: std::terminate, SIGABRT, after all work was done (torch 2.13: one job in six). If the group's last
# reference goes at that moment with a DistributedDataParallel, whose destructor holds the lock while it joins the
# threads, the process hangs. The interpreter does not end before this time is over.
_KEEP_ALIVE_S = 0.5
# Seconds that a failing rank gives its backend to release operations that the others will never finish.
_FAILED_DESTROY_S = 10.0

_CONNECT_S = 20.0
_MAX_DIMS = 14
names_of_exchanges[__file__] = lambda code: code.co_qualname.partition(".")[2].partition(".")[0] or code.co_name


class Exchanges:
    """Exchange values between this process and the others of one of torch's groups.

    Attributes:
        device: the device of this process.
        rank: number of this process among those of the group, from 0.
        world_size: number of processes in the group.
    """

    device: torch.device
    rank: int
    world_size: int
    _group: Any = None  # torch's default group
    _host: torch.device
    _agreeing: Any  # torch's group of these processes for `all_reduce_max`; None of one alone

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over all ranks, on every rank; the argument is unchanged. No sync."""
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group)
        return total

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's `tensor` of shape `(n, ...)` along dimension 0, in rank order.

        The ranks compare shapes and dtypes first, on the host: with unequal ones gloo ends the process or
        returns uninitialised memory. Not for each step.

        Raises:
            ValueError: the tensor has no dimension, or the ranks' shapes or dtypes differ.
        """
        if not 1 <= tensor.dim() <= _MAX_DIMS:
            raise ValueError(
                f"gather needs 1 to {_MAX_DIMS} dimensions to concatenate along the first, not shape "
                f"{tuple(tensor.shape)}; give a number as tensor.reshape(1)"
            )
        self._check_same_shape(tensor)
        return self._all_gather(tensor.detach().contiguous()).flatten(0, 1)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's picklable `value`, in rank order. Exchanged through the host: not for each step."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all_reduce_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start to find the largest of each of `values` over all ranks; the returned function waits. On the host.

        All ranks start such calls in the same order.
        """
        if self._agreeing is None:
            return lambda: list(values)
        largest = torch.tensor(values, dtype=torch.int64)
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._agreeing, async_op=True)

        def read() -> list[int]:
            if work is not None:
                work.wait()
            return largest.tolist()

        return read

    def barrier(self) -> None:
        """Wait until every rank has called it."""
        present = torch.ones((), device=self._host)
        dist.all_reduce(present, group=self._group)
        present.item()  # sync: a barrier must not return before the others have come

    def _all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        dist.all_gather(list(gathered.unbind(0)), tensor, group=self._group)
        return gathered

    def _check_same_shape(self, tensor: torch.Tensor) -> None:
        form = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        mine = torch.zeros(_MAX_DIMS + 2, dtype=torch.int64)
        mine[: len(form)] = torch.tensor(form)
        forms = self._all_gather(mine.to(self._host)).cpu()  # sync without gloo: in evaluation only
        if not torch.equal(forms, forms[:1].expand_as(forms)):
            shown = ", ".join(
                f"rank {rank} {_DTYPES[number]} {tuple(rest[:dims])}"
                for rank, (number, dims, *rest) in enumerate(forms.tolist())
            )
            raise ValueError(
                f"gather needs one shape and dtype on all ranks, not {shown}; pad to the longest, or use gather_objects"
            )


class ProcessGroup(Exchanges):
    """This process among the ranks of its job.

    Joins torch's default process group, or uses the existing one. Several objects in one process
    share the group. The last to leave destroys it, unless other code made it; such a group keeps its backend and
    its timeout.

    Args:
        environment: identifies this process.
        device: the device of this process.
        backend: the backend for collectives: `gloo`, `nccl`, `mpi`, or pairs like `cpu:gloo,cuda:nccl`. None
            takes gloo for the CPU, and NCCL with gloo (for values on the host) for CUDA.
        timeout_s: seconds after which a rank stops waiting for the others, in joining and in each collective.
        hang_timeout_s: seconds without progress of any rank after which all are ended with a report; 0 never. None
            takes nine tenths of `timeout_s`, and ends only a job in which a rank waits for another.

    Attributes:
        device: the device of this process.
        rank: number of this process among all, from 0.
        local_rank: number of this process on its machine, from 0.
        world_size: number of processes.
        backend: the backend for collectives.
        coordinates: place of this process in each direction of a mesh, by name, from 0; empty without a mesh.

    Raises:
        ValueError: the backend is not available or not for this device, or `timeout_s` is not positive, or
            `hang_timeout_s` negative.
        ConnectionError: the ranks did not find each other.
        RuntimeError: the existing group differs from the environment.
    """

    coordinates: Mapping[str, int] = {}

    def __init__(
        self,
        environment: LaunchEnvironment,
        device: torch.device,
        *,
        backend: str | None = None,
        timeout_s: float = 1800.0,
        hang_timeout_s: float | None = None,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s:g} must be positive: the seconds to wait for other ranks")
        if hang_timeout_s is not None and hang_timeout_s < 0:
            raise ValueError(f"hang_timeout_s={hang_timeout_s:g} is negative; give seconds, or 0 for no watch")
        if os.environ.get(ELASTIC_RUN) and environment.world_size > 1:
            raise ValueError(
                "trainer launch --elastic needs a run whose processes may come and go: elastic='bitwise' and "
                "virtual_shards, without fsdp; or start it without --elastic"
            )
        self.device, self.local_rank = device, environment.local_rank
        self._member, self._timeout = False, timedelta(seconds=timeout_s)
        self._asked = backend, timeout_s, hang_timeout_s
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self._join(environment)

    def _join(self, environment: LaunchEnvironment, store: dist.Store | None = None) -> None:
        """Join the group of the processes of an environment, which meet at its address or have met at a store."""
        backend, timeout_s, hang_timeout_s = self._asked
        self.rank, self.world_size = environment.rank, environment.world_size
        if not dist.is_initialized():
            self._make(environment, _check_backend(backend, self.device), timeout_s, store)
        self.backend = str(dist.get_backend_config())
        self._check_is_as_launched(backend)
        if here.is_made_here:
            here.users += 1
            self._member = True
        # Values on the host go through gloo if possible, so that they never wait for the GPU.
        self._host = torch.device("cpu") if "gloo" in _names(self.backend) else self.device
        self._agreeing = self._join_to_agree()
        if self._agreeing is not None and hang_timeout_s != 0:
            self._watch_for_hangs(hang_timeout_s, timeout_s)

    def _make(
        self, environment: LaunchEnvironment, backend: str, timeout_s: float, store: dist.Store | None = None
    ) -> None:
        have_met = store is not None  # then who does not connect soon is lost
        store = store or open_store(environment, timeout_s=timeout_s)
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=timedelta(seconds=min(timeout_s, _CONNECT_S) if have_met else timeout_s),
            )
            if have_met:
                dist.distributed_c10d._set_pg_timeout(self._timeout)
        except RuntimeError as error:
            raise ConnectionError(
                f"rank {self.rank} of {self.world_size} met at {meeting_place(environment)}, but could not "
                f"connect to the others by {backend}: {error}; see whether every rank is running and how the "
                "first one failed"
            ) from error
        here.is_made_here, here.users, here.former_watch = True, 0, None
        here.leave_at_exit()

    def _check_is_as_launched(self, backend: str | None) -> None:
        """Refuse a group that differs from the environment, or that would train unsynchronised copies."""
        found = (dist.get_rank(), dist.get_world_size())
        if found != (self.rank, self.world_size):
            raise RuntimeError(
                f"the process group has rank {found[0]} of {found[1]}, but the launch environment says rank "
                f"{self.rank} of {self.world_size}; set RANK and WORLD_SIZE as the group has them, or let "
                "tr_dist make the group"
            )
        if not _names(backend) <= _names(self.backend):
            raise RuntimeError(
                f"the process group that exists has backend {self.backend}, not {backend}; ask for that one, or leave "
                "the group before asking for another"
            )
        present = int(self.sum(torch.ones((), dtype=torch.int64, device=self.device)))  # sync: once, at the start
        if present != self.world_size:
            raise RuntimeError(
                f"a sum of ones over {self.world_size} ranks gave {present}: backend {self.backend} does not "
                "reach all ranks"
            )

    def all_reduce_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start to find the largest of each of `values` over all ranks; the returned function waits. On the host.

        All ranks start such calls in the same order. On one machine they use a page of shared memory and no
        collective, on several a gloo group of their own: they wait for no other exchange and none waits for them.
        """
        of_page = isinstance(self._agreeing, SharedPage)
        return self._agreeing.all_reduce_max(values) if of_page else super().all_reduce_max(values)

    def _join_to_agree(self) -> Any:
        """Return the page or the gloo group of `all_reduce_max`, None for one rank alone.

        It is made while all ranks are alive. Later a failed rank could not join, and the others would wait for the
        timeout; an existing one ends with the rank.
        """
        if self.world_size == 1:
            return None
        if self._member and here.agreeing:
            return here.agreeing[0]
        page = open_page(self.gather_objects, self.rank, self.world_size, self._timeout.total_seconds())
        agreeing = dist.new_group(backend="gloo", timeout=self._timeout) if page is None else page
        if self._member:
            here.agreeing.append(agreeing)
        return agreeing

    def _watch_for_hangs(self, hang_timeout_s: float | None, timeout_s: float) -> None:
        """Begin to watch the group, unless another object of this process has begun. Collective then."""
        if here.watch is not None and here.watch[0] is dist.group.WORLD:
            return
        here.leave_watch()
        watch = HangWatch(self.rank, self.world_size, limits_of(hang_timeout_s, timeout_s))
        watch.start(self.gather_objects, getattr(self._agreeing, "number_started", None))
        here.watch = (dist.group.WORLD, watch)
        here.leave_at_exit()

    def watching(self, progress: Callable[[], tuple[int, str, int]], folder: str) -> AbstractContextManager[None]:
        """Return a block in which the watch for hangs gets steps and phases, and writes reports to a folder.

        Args:
            progress: returns the completed steps, the phase, and a number that changes as the phase goes on. It is
                called from another thread, about once in five seconds.
            folder: for the report of a hang.
        """
        if here.watch is None:
            return nullcontext()
        place = ", ".join(f"{name} {number}" for name, number in self.coordinates.items())
        return here.watch[1].following(progress, folder, place)

    def lost_ranks(self) -> dict[int, str]:
        """Return the ranks of which the watch for hangs has lost sight, and how it knows; empty without one."""
        watch = here.former_watch if here.watch is None else here.watch[1]
        return {} if watch is None else watch.lost()

    def leave(self, *, failed: bool = False) -> None:
        """Leave the group; the last object of a process to leave destroys it, if this class made it.

        Args:
            failed: the run ends by an exception, so other ranks may be gone: do not wait for them.
        """
        if not self._member:
            _close_page(self._agreeing)
            return
        self._member = False
        here.users -= 1
        if here.users > 0 or not dist.is_initialized():
            return
        if failed:
            here.leave_watch(sys.exc_info()[1], failed=True)
            here.destroy_within(_FAILED_DESTROY_S)
        else:
            self.barrier()  # a rank that ends early closes the store and sockets that others still use
            here.leave_watch()
            here.destroy()


_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def _check_backend(backend: str | None, device: torch.device) -> str:
    """Return the backend to use on this device, or raise with the reason against the requested one."""
    if backend is None:
        if device.type != "cuda":
            return "gloo"
        return "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
    for name in sorted(_names(backend)):
        if not dist.is_backend_available(name):
            known = [known for known in dist.Backend.backend_list if dist.is_backend_available(known)]
            raise ValueError(
                f"backend={backend!r}: this torch has no {name!r}; it has {', '.join(known) or 'none'} "
                "(set ddp_backend to one of them, or leave it out)"
            )
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(
            f"backend='nccl' carries CUDA tensors only, and this rank computes on {device}; use backend='gloo'"
        )
    return backend


def _names(backend: str | None) -> set[str]:
    """Return the names in `gloo` or `cpu:gloo,cuda:nccl`, without the devices."""
    return {pair.rpartition(":")[2] for pair in backend.split(",")} if backend else set()


def _close_page(agreeing: Any) -> None:
    if isinstance(agreeing, SharedPage):
        agreeing.close()


class Membership:
    """What the objects of this process share: the group that it is in, with its watch, and the groups that it left.

    Attributes:
        users: objects that share the group that this package made.
        is_made_here: whether this package made the group.
        agreeing: what `all_reduce_max` of all objects uses, once it was made.
        watch: a group, whoever made it, and its watch.
        former_watch: what it knew when the group was left: a save may go on in the background.
        is_stuck: whether a thread still destroys the group.
        leaves_others: whether a group that other code made is destroyed at exit.
    """

    def __init__(self) -> None:
        self.users, self.is_made_here, self.leaves_others, self.is_stuck = 0, False, False, False
        self.agreeing: list[Any] = []
        self.watch: tuple[Any, HangWatch] | None = None
        self.former_watch: HangWatch | None = None
        self._left: list[tuple[float, Any]] = []  # destroyed groups that are kept alive, since when
        self._inherited: list[Any] = []
        self._is_registered = False

    def keep_inherited(self) -> None:
        """In a fork: never release the groups that the parent left. Their threads are not copied, so it would hang."""
        self._inherited, self._left = [*self._inherited, *self._left], []

    def destroy(self) -> None:
        """Destroy the group, and keep it alive for a moment."""
        self._release_expired()
        for agreeing in self.agreeing:
            _close_page(agreeing)
        kept = (dist.group.WORLD, *self.agreeing)
        dist.destroy_process_group()
        self._left.append((time.monotonic(), kept))
        self.is_made_here, self.agreeing = False, []

    def destroy_within(self, seconds: float) -> None:
        """Destroy it in a thread that may be abandoned: a backend can wait for ranks that are gone."""
        thread = threading.Thread(target=self.destroy, daemon=True)
        thread.start()
        thread.join(seconds)
        self.is_stuck = thread.is_alive()

    def leave_watch(self, error: BaseException | None = None, *, failed: bool = False) -> None:
        """End the watch, which tells the other ranks why."""
        if self.watch is not None:
            why = "it left the group" if error is None else f"{type(error).__name__}: {error}"
            # After Ctrl-C or sys.exit no other rank is the cause.
            self.former_watch, self.watch = self.watch[1], None
            self.former_watch.leave(why, failed=isinstance(error, Exception) or (failed and error is None), error=error)

    def leave_at_exit(self) -> None:
        """Have the interpreter's exit leave the group."""
        if not self._is_registered:
            atexit.register(self._exit)
            self._is_registered = True

    def _exit(self) -> None:
        """Prepare the interpreter's exit: destroy open groups, then wait until no backend thread needs the lock."""
        self.leave_watch(getattr(sys, "last_value", None))  # the exception that ends the interpreter
        if (self.is_made_here or self.leaves_others) and dist.is_initialized() and not self.is_stuck:
            self.destroy_within(_FAILED_DESTROY_S)  # it is unknown how the run ended: other ranks are not waited for
        watch = self.former_watch
        # The watch's thread would abort the process. Only an exception, not sys.exit, says here what the exit code is.
        is_left_behind = watch is not None and watch.is_stuck and getattr(sys, "last_value", None) is not None
        if self.is_stuck or is_left_behind:
            flush_streams()
            os._exit(1)  # finalizing would join the stuck thread; the traceback has been printed by now
        self.release_left()

    def release_left(self) -> None:
        """Release the groups that were left, which closes their connections, once that is safe."""
        time.sleep(max((_keep_alive_s(left_at) for left_at, _ in self._left), default=0.0))
        self._release_expired()

    def _release_expired(self) -> None:
        self._left = [(left_at, group) for left_at, group in self._left if _keep_alive_s(left_at) > 0]


def _keep_alive_s(left_at: float) -> float:
    return max(0.0, left_at + _KEEP_ALIVE_S - time.monotonic())


here = Membership()


def leave_at_exit() -> None:
    """Destroy the group of this process at the interpreter's exit, also if other code made it and does not do so."""
    here.leaves_others = True
    here.leave_at_exit()
