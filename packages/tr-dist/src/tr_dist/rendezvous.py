"""Open the key-value store through which the ranks of a job find each other."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from tr_dist.environment import LaunchEnvironment
from tr_log.streams import write_text

# A store lives as long as its process: rank 0 serves it, and a later group of the same process uses it again.
_stores: dict[LaunchEnvironment, dist.Store] = {}
_meetings = itertools.count()
# Torch's own waits ignore Ctrl-C and last half an hour, so this one polls, at first often.
_FIRST_POLL_S, _LAST_POLL_S = 0.01, 0.5
# When it is said that others have not come, and how often again.
_SAY_S, _SAY_AGAIN_S = 30.0, 60.0

Value = TypeVar("Value")


def open_store(environment: LaunchEnvironment, *, timeout_s: float) -> dist.Store:
    """Return a store that all ranks of this start of the job share, and no earlier start.

    An elastic launcher restarts the processes on the store of the failed ones, where gloo would read the
    addresses of dead processes. So every restart, and every further group of a process, has separate keys. A store
    that rank 0 serves is new with each start, and launchers of machines that came later count fewer restarts.

    Raises:
        ConnectionError: the port is taken, other ranks did not come within `timeout_s`, two ranks have the same
            number, or the ranks were started with different world sizes.
    """
    if environment not in _stores:
        store = _connect(environment, timedelta(seconds=timeout_s))
        if environment.world_size > 1:
            _wait_for_all(dist.PrefixStore(f"{_attempt(environment)}/here", store), environment, timeout_s)
        _stores[environment] = store
    meeting = next(_meetings)  # the same on all ranks, which join and leave together
    return dist.PrefixStore(f"{_attempt(environment)}/group_{meeting}", _stores[environment])


def meeting_place(environment: LaunchEnvironment) -> str:
    """Return the place where the ranks meet, for messages."""
    if environment.rendezvous_file:
        return f"file {environment.rendezvous_file}"
    if environment.world_size == 1:
        return "this process"
    return f"{environment.master_addr}:{environment.master_port}"


def _attempt(environment: LaunchEnvironment) -> str:
    is_kept = environment.agent_store or environment.rendezvous_file
    return f"attempt_{environment.restart_count if is_kept else 0}"


def _wait_for_all(store: dist.Store, environment: LaunchEnvironment, timeout_s: float) -> None:
    """Register this rank, and wait for all others: torch's own wait does not name missing ranks."""
    rank, size, place = environment.rank, environment.world_size, meeting_place(environment)
    me = f"rank {rank} of {size}"
    # A launcher that serves the store assigns the numbers itself, and may reassign them when machines come or go.
    if not environment.agent_store and store.add(f"times_{rank}", 1) > 1:
        raise ConnectionError(
            f"{me} came to {place}, where another process with RANK={rank} is already; start every process with a RANK "
            "of its own, and a new job at a new port or file"
        )
    names = [str(number) for number in range(size)]
    try:
        store.set(str(rank), str(size))
        _poll(store, names, timeout_s, environment)
        sizes = [int(value) for value in store.multi_get(names)]
    except RuntimeError:  # the class depends on the kind of store
        raise ConnectionError(f"{me} {_why_not_all(store, names, place, timeout_s)}") from None
    for number, other in enumerate(sizes):
        if other != size:
            raise ConnectionError(
                f"{me} and rank {number} of {other} met at {place}: they were not started as one job; give all the "
                "same WORLD_SIZE"
            )


def _poll(store: dist.Store, names: list[str], timeout_s: float, environment: LaunchEnvironment) -> None:
    """Wait until a store has the names of all ranks, and say after a while whose are missing.

    Raises:
        RuntimeError: a name did not appear in time, or the connection was lost.
    """
    begun_s, said_s, pause_s = time.monotonic(), _SAY_S - _SAY_AGAIN_S, _FIRST_POLL_S
    for name in names:  # one at a time: many ranks poll the one that serves
        while not store.check([name]):
            waited_s = time.monotonic() - begun_s
            if waited_s > timeout_s:
                raise RuntimeError(f"{name} is not there after {timeout_s:g} s")
            if waited_s - said_s >= _SAY_AGAIN_S:
                said_s = waited_s
                missing = [name for name in names if not store.check([name])]
                _say_wait(environment, ", ".join(missing), waited_s, timeout_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_POLL_S)


def _say_wait(environment: LaunchEnvironment, missing: str, waited_s: float, timeout_s: float) -> None:
    """Say for whom this rank waits, on one rank of a machine; on that of rank 0 on the next one, too."""
    if environment.local_rank == 0 or environment.rank == 1:
        me, place = f"rank {environment.rank} of {environment.world_size}", meeting_place(environment)
        text = f"{me} has waited {waited_s:.0f} s at {place} for rank {missing} to come; it gives up after"
        write_text(sys.stderr, f"{text} {timeout_s:g} s\n")


def _interruptible(wait: Callable[[], Value], say: Callable[[float], None]) -> Value:
    """Return the result of a function that ignores Ctrl-C; it runs in a thread, which an interrupt leaves behind.

    Args:
        wait: the function.
        say: called with the seconds that it has taken, once in a while.
    """
    results: list[Value] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(wait())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True, name="meeting of the ranks")
    begun_s = time.monotonic()
    thread.start()
    thread.join(_SAY_S)
    while thread.is_alive():
        say(time.monotonic() - begun_s)
        thread.join(_SAY_AGAIN_S)
    if errors:
        raise errors[0]
    return results[0]


def _why_not_all(store: dist.Store, names: list[str], place: str, timeout_s: float) -> str:
    try:
        missing = ", ".join(name for name in names if not store.check([name]))
    except RuntimeError as error:
        return f"lost its connection to rank 0 at {place}, whose output says why: {error}"
    return (
        f"waited {timeout_s:g} s at {place}, and rank {missing} did not come; every rank must be running, with the "
        "same MASTER_ADDR, MASTER_PORT and WORLD_SIZE, and able to reach that address"
    )


def _connect(environment: LaunchEnvironment, timeout: timedelta) -> dist.Store:
    if environment.world_size == 1:
        return dist.HashStore()  # a single process needs no port
    if environment.rendezvous_file:
        return dist.FileStore(environment.rendezvous_file, environment.world_size)
    if environment.master_addr is None or environment.master_port is None:
        raise ValueError(f"no MASTER_ADDR and MASTER_PORT for {environment.world_size} processes to meet")
    serves = environment.rank == 0 and not environment.agent_store
    try:
        return _interruptible(
            lambda: _tcp_store(environment, timeout, serves),
            lambda waited_s: _say_wait(environment, "0", waited_s, timeout.total_seconds()),
        )
    except RuntimeError as error:
        # Torch 2.6 has no class of its own for a port that is taken.
        if not isinstance(error, dist.DistError) and "EADDRINUSE" not in str(error):
            raise
        raise ConnectionError(_explain(error, environment, timeout, serves)) from None


def _tcp_store(environment: LaunchEnvironment, timeout: timedelta, serves: bool) -> dist.Store:
    assert environment.master_addr is not None
    assert environment.master_port is not None
    return dist.TCPStore(
        environment.master_addr,
        environment.master_port,
        environment.world_size,
        is_master=serves,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _explain(error: Exception, environment: LaunchEnvironment, timeout: timedelta, serves: bool) -> str:
    place, rank = meeting_place(environment), f"rank {environment.rank} of {environment.world_size}"
    if serves and "EADDRINUSE" in str(error):
        return (
            f"{rank} cannot serve {place}: the port is taken, perhaps by another job or a second process with RANK=0; "
            "choose another MASTER_PORT, the same for all ranks"
        )
    said = str(error).splitlines()[0].rstrip(".")
    return (
        f"{rank} waited {timeout.total_seconds():g} s at {place}, and rank 0 did not come ({said}); every rank must be "
        "running, with the same MASTER_ADDR and MASTER_PORT, and able to reach that address"
    )
