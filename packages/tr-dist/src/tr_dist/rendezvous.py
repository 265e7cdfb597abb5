"""Open the key-value store through which the ranks of a job find each other."""

from __future__ import annotations

import itertools
from datetime import timedelta

import torch.distributed as dist

from tr_dist.environment import LaunchEnvironment

# A store lives as long as its process: rank 0 serves it, and a later group of the same process meets on it
# again.
_stores: dict[LaunchEnvironment, dist.Store] = {}
_meetings = itertools.count()


def open_store(environment: LaunchEnvironment, *, timeout_s: float) -> dist.Store:
    """Return a store that all ranks of this start of the job share, and no earlier start.

    An elastic launcher restarts the processes on the store of the failed ones, where gloo would read the
    addresses of the dead; so every restart, and every group that a process joins anew, has keys of its own. A store
    that rank 0 serves is new with each start, and launchers of machines that came later count fewer restarts.

    Raises:
        ConnectionError: the port is taken, or the other ranks did not come within `timeout_s`.
    """
    if environment not in _stores:
        _stores[environment] = _connect(environment, timedelta(seconds=timeout_s))
    meeting = next(_meetings)  # the same on all ranks, which join and leave together
    attempt = environment.restart_count if environment.agent_store or environment.rendezvous_file else 0
    return dist.PrefixStore(f"attempt_{attempt}/group_{meeting}", _stores[environment])


def meeting_place(environment: LaunchEnvironment) -> str:
    """Name where the ranks meet, for messages."""
    if environment.rendezvous_file:
        return f"file {environment.rendezvous_file}"
    if environment.world_size == 1:
        return "this process"
    return f"{environment.master_addr}:{environment.master_port}"


def _connect(environment: LaunchEnvironment, timeout: timedelta) -> dist.Store:
    if environment.world_size == 1:
        return dist.HashStore()  # nobody to meet, and no port to occupy
    if environment.rendezvous_file:
        return dist.FileStore(environment.rendezvous_file, environment.world_size)
    if environment.master_addr is None or environment.master_port is None:
        raise ValueError(f"no MASTER_ADDR and MASTER_PORT for {environment.world_size} processes to meet")
    serves = environment.rank == 0 and not environment.agent_store
    try:
        return dist.TCPStore(
            environment.master_addr,
            environment.master_port,
            environment.world_size,
            is_master=serves,
            timeout=timeout,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise ConnectionError(_explain(error, environment, timeout, serves)) from error


def _explain(error: Exception, environment: LaunchEnvironment, timeout: timedelta, serves: bool) -> str:
    place, rank = meeting_place(environment), f"rank {environment.rank} of {environment.world_size}"
    if serves and "EADDRINUSE" in str(error):
        return (
            f"{rank} cannot serve {place}: the port is taken, perhaps by another job; "
            "choose another MASTER_PORT, the same for all ranks"
        )
    return (
        f"{rank} waited {timeout.total_seconds():g} s at {place} and the others did not come ({error}); "
        "every rank must be running, with the same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and able to "
        "reach that address"
    )
