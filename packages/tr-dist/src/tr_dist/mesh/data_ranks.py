"""Exchange values between the processes of a mesh that compute other samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tr_dist.process_group import Exchanges


def own_group(ranks: list[list[int]], rank: int, timeout: timedelta, backend: str | None = None) -> Any:
    """Return torch's group of those of `ranks` that has `rank`, this process's; None if none has. Makes no others."""
    own = next((group for group in ranks if rank in group), None)
    return own and dist.new_group(own, timeout, backend, use_local_synchronization=True)


class DataRanks(Exchanges):
    """This process among those that compute other samples: one of each group that computes a sample together.

    Collective over those ranks: each process makes the groups that it is in, so that thousands start as fast as a few.

    Args:
        ranks: of each place within a sample's group, the job's ranks of that place, by number of replica.
        rank: this process among the job's.
        local_rank: number of this process on its machine, from 0.
        device: the device of this process.
        host: where values on the host are exchanged from.
        timeout: how long an exchange waits for other processes.
    """

    agrees_by = "gloo"  # the backend of what is agreed on the host

    def __init__(
        self,
        ranks: list[list[int]],
        rank: int,
        local_rank: int,
        device: torch.device,
        host: torch.device,
        timeout: timedelta,
    ) -> None:
        own = next(group for group in ranks if rank in group)
        self.device, self._host, self.local_rank = device, host, local_rank
        self.rank, self.world_size = own.index(rank), len(own)
        self._group = own_group(ranks, rank, timeout)
        # A group of its own: these exchanges wait for no others, and none waits for them.
        self._agreeing = own_group(ranks, rank, timeout, self.agrees_by)

    @property
    def group(self) -> Any:
        """Return torch's group of these ranks."""
        return self._group

    @property
    def host_group(self) -> Any:
        """Return torch's group of these ranks for values on the host."""
        return self._agreeing

    @property
    def data(self) -> DataRanks:
        """Return itself: each of these computes samples of its own."""
        return self

    def all_reduce_max(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Start to find the largest of each of `values` over these ranks; the returned function waits. On the host."""
        if self.world_size == 1:
            return lambda: list(values)
        largest = torch.tensor(values, dtype=torch.int64)
        work: Any = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._agreeing, async_op=True)

        def read() -> list[int]:
            work.wait()
            return largest.tolist()

        return read
