"""Simulate one rank of a job of any size in one process, to see what it would hold and exchange."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from tr_dist.mesh.data_ranks import DataRanks
from tr_dist.process_group import Exchanges, ProcessGroup

_EXCHANGED_ELSEWHERE = ("TR_RENDEZVOUS_FILE", "SLURM_STEP_NUM_TASKS", "TORCHELASTIC_RUN_ID", "CROSS_SIZE", "LOCAL_SIZE")


@contextmanager
def fake_rank(rank: int, world_size: int, *, local_world_size: int | None = None) -> Iterator[None]:
    """Make strategies that are built here act as rank `rank` of `world_size`, without the other ranks.

    torch's fake process group transfers nothing: layouts, sizes, and the calls of collectives are those of the rank,
    values are not. Where a strategy itself exchanges values, the other ranks count as equal to this one: a sum is
    `world_size` times its own value. Drop strategies and prepared models before the end.

    Args:
        rank: number of the simulated rank, from 0.
        world_size: number of ranks.
        local_world_size: ranks on each machine; all are on one if None.

    Raises:
        RuntimeError: this process has a process group already.
        ValueError: the rank does not exist, or the machines would have unequal numbers of ranks.
    """
    local = local_world_size or world_size
    if not 0 <= rank < world_size or world_size % local:
        raise ValueError(
            f"fake_rank: there is no rank {rank} of {world_size} with {local} on each machine; ranks count from 0, and "
            "machines have as many each"
        )
    if dist.is_initialized():
        raise RuntimeError("fake_rank: this process has a process group already; leave it first")
    launched = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % local,
        "LOCAL_WORLD_SIZE": local,
        "GROUP_RANK": rank // local,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": 1,
    }
    with mock.patch.dict(os.environ, {name: str(value) for name, value in launched.items()}):
        for name in _EXCHANGED_ELSEWHERE:
            os.environ.pop(name, None)
        with (
            mock.patch.multiple(Exchanges, sum=_sum, gather_objects=_gather_objects),
            # gloo would wait for the other ranks
            mock.patch.object(ProcessGroup, "_join_to_agree", return_value=None),
            mock.patch.object(DataRanks, "agrees_by", "fake"),
        ):
            store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
            dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)
            try:
                yield
            finally:
                dist.destroy_process_group()


def _sum(group: Exchanges, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() * group.world_size


def _gather_objects(group: Exchanges, value: Any) -> list[Any]:
    return [value] * group.world_size
