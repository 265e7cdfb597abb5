"""Exchange values between the processes of a mesh that compute other samples."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tr_dist.process_group import Exchanges, ProcessGroup


def own_group(ranks: list[list[int]], job: ProcessGroup, backend: str | None = None) -> Any:
    """Return torch's group of those of `ranks` that this process is in; None if it is in none. Makes no others."""
    own = next((group for group in ranks if job.rank in group), None)
    return own and dist.new_group(own, job._timeout, backend, use_local_synchronization=True)


class DataRanks(Exchanges):
    """This process among those that compute other samples: one of each group that computes a sample together.

    Collective over those ranks: each process makes the groups that it is in, so that thousands start as fast as a few.

    Args:
        ranks: of each place within a sample's group, the job's ranks of that place, by number of replica.
        job: this process among all.

    Attributes:
        group: torch's group of these ranks.
        host_group: that for values on the host; None of one rank alone.
    """

    agrees_by = "gloo"  # the backend of what is agreed on the host

    def __init__(self, ranks: list[list[int]], job: ProcessGroup) -> None:
        own = next(group for group in ranks if job.rank in group)
        self.device, self._host, self.local_rank = job.device, job._host, job.local_rank
        self.rank, self.world_size = own.index(job.rank), len(own)
        self.group = self._group = own_group(ranks, job)
        # A group of its own: these exchanges wait for no others, and none waits for them.
        self.host_group = self._agreeing = own_group(ranks, job, self.agrees_by) if len(own) > 1 else None

    @property
    def data(self) -> DataRanks:
        """Return itself: each of these computes samples of its own."""
        return self
