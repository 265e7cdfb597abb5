"""A loop by hand of two ranks, which are threads of one process and save and restore together."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from crash_training import Held, digest
from schedule_storms import Storm

from tr_ckpt import Checkpointer

STEPS = 8
WAIT_S = 60.0  # for the other rank


class Walk(Held):
    """A part whose state says which steps were made, in which order."""

    def __init__(self) -> None:
        super().__init__(values=torch.zeros(5), steps=0)

    def step(self) -> None:
        step = self.state["steps"] + 1
        values = (self.state["values"] * 1.7 + step) % 11
        self.state = {"values": values, "steps": step}


def _alone() -> str:
    walk = Walk()
    for _ in range(STEPS):
        walk.step()
    return digest({"model": walk.state, "optimizer": walk.state})


REFERENCE = _alone()


class _Exchange:
    """What two threads know of each other."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=WAIT_S)
        self._values: list[Any] = [None, None]

    def of(self, rank: int) -> Any:
        """Return `gather_objects` of a rank."""

        def gather_objects(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            gathered = list(self._values)
            self._barrier.wait()
            return gathered

        return gather_objects


def in_two_ranks(run: Path, storm: Storm, *, every: int, keep_last: int | None, asynchronous: bool) -> str:
    """Make the steps that are left, on both ranks, and return the digest of the end.

    Raises:
        Exception: what rank 0 raised.
        AssertionError: the ranks did not end alike.
    """
    exchange, ends = _Exchange(), [None, None]

    def rank(number: int) -> None:
        try:
            ends[number] = _train(run, number, exchange.of(number), every, keep_last, asynchronous)
        except Exception as error:
            ends[number] = error

    with storm.raging():
        threads = [threading.Thread(target=rank, args=(number,), name=f"rank-{number}") for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    first, second = ends
    failed = [isinstance(end, Exception) for end in ends]
    if any(isinstance(end, threading.BrokenBarrierError) for end in ends) or failed[0] != failed[1]:
        raise AssertionError(f"the ranks do not end alike: {first!r} and {second!r}")
    if isinstance(first, Exception):
        raise first
    assert first == second, "the ranks end with different bits"
    return first


def _train(run: Path, rank: int, gather_objects: Any, every: int, keep_last: int | None, asynchronous: bool) -> str:
    keeper = Checkpointer(
        run, keep_last=keep_last, asynchronous=asynchronous, rank=rank, world_size=2, gather_objects=gather_objects
    )
    parts = {"model": Walk(), "optimizer": Walk()}
    keeper.restore(parts)
    while parts["model"].state["steps"] < STEPS:
        for part in parts.values():
            part.step()
        step = parts["model"].state["steps"]
        if step % every == 0 or step == STEPS:
            keeper.save(step, parts)
    keeper.close()
    return digest({name: part.state for name, part in parts.items()})
