"""What the ranks do that save together in the background."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ckpt_faults import held
from ckpt_parts import number_of, parts
from ckpt_workers import caught, checkpointer

from tr_ckpt import RNGState, files, rank_records


def given(number: int) -> dict[str, Any]:
    return {**parts(number), "rng": RNGState()}


def sum_over_ranks() -> float:
    """Communicate, as training does."""
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def save_and_train_on(directory: str) -> None:
    """Both save, communicate while the one or the other is writing, and find what they saved."""
    rank = dist.get_rank()
    keeper = checkpointer(directory, keep_last=2, asynchronous=True)
    for slow in (0, 1):
        torch.manual_seed(100 * slow + rank)
        step = slow + 1
        expected = torch.rand(5)
        torch.manual_seed(100 * slow + rank)
        with held() as writing:
            keeper.save(step, given(step), write_extra=lambda folder: (folder / "config.json").write_text("{}"))
            if rank != slow:
                writing.let_go()
            for _ in range(20):
                assert sum_over_ranks() == 2
            assert not (Path(directory) / f"checkpoint-{step}").exists()
            assert keeper._background.is_busy()
            writing.let_go()
            keeper.wait()
        assert keeper.steps()[-1] == step
        into = parts()
        assert keeper.restore({**into, "rng": RNGState()}) == step
        assert number_of(into) == step
        assert torch.equal(torch.rand(5), expected)
    allocations = keeper._buffers.allocations
    rename = files.rename
    if rank == 0:  # is slow to put it in its place
        files.rename = lambda source, target: (time.sleep(0.3), rename(source, target))
    for step in (3, 4, 5):  # one after the other, without waiting for any
        keeper.save(step, given(step))
    # Not together: a rank that asks must see what rank 0 has put in its place.
    if rank == 0:
        assert keeper._buffers.allocations == allocations
    else:
        assert keeper.steps()[-1] == 5
    keeper.close()
    assert keeper.steps() == [4, 5]
    assert not list(Path(directory).glob(".tmp-*"))


def fail_on(failing: int, how: str) -> None:
    """Have this rank's disk fail for its own files, or for all of them."""
    if dist.get_rank() != failing:
        return
    original = files.create

    def create(path: Path) -> int:
        if threading.current_thread().name != threading.main_thread().name:
            own = path.name.startswith(("rng-", "model")) or how == "full"
            if own:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(path)

    files.create = create


def fail_on_one(directory: str, failing: int, how: str) -> None:
    """One rank cannot write: all raise, once, and what was there before is there still."""
    rank = dist.get_rank()
    keeper = checkpointer(directory, asynchronous=True)
    keeper.save(1, given(10))
    keeper.wait()
    create = files.create
    fail_on(failing, how)
    keeper.save(2, given(20))
    message = caught(keeper.wait)
    if rank == failing:
        assert message.startswith("OSError: [Errno 28] checkpoint-2 was not saved in "), message
    elif failing == 0:
        assert message.startswith("SaveError: a write in the background failed: rank 0: OSError: [Errno 28]"), message
    elif how == "full":
        wanted = "SaveError: checkpoint-2 was not saved: rank 1: could not write its share, nor why: see what it logged"
        assert message == wanted, message
    else:
        assert message.startswith("SaveError: checkpoint-2 was not saved: rank 1: OSError: [Errno 28] "), message
    assert caught(keeper.check) == caught(keeper.wait) == "nothing raised"
    files.create = create
    assert keeper.steps() == [1]
    assert not list(Path(directory).glob(".tmp-*"))
    dist.barrier()

    # The next save raises what nobody asked about, on all ranks, and the one after it works.
    fail_on(failing, how)
    keeper.save(3, given(30))
    keeper._background.join()
    assert "not saved" in caught(lambda: keeper.save(4, given(40)))
    files.create = create
    keeper.save(5, given(50))
    keeper.close()
    assert keeper.steps() == [1, 5]
    into = parts()
    assert keeper.restore({**into, "rng": RNGState()}) == 5
    assert number_of(into) == 50


def rank_1_takes_too_long(directory: str) -> None:
    """Rank 0 gives up, and rank 1 learns of it when it is done."""
    rank = dist.get_rank()
    rank_records.LIMIT_S = 0.3 if rank == 0 else 60
    keeper = checkpointer(directory, asynchronous=True)
    keeper.save(1, given(10))
    keeper.wait()
    with held() as writing:
        if rank == 0:
            writing.let_go()
        keeper.save(2, given(20))
        if rank == 0:
            keeper._background.join()
            message = caught(keeper.check)
            wanted = "SaveError: checkpoint-2 was not saved: rank 1: did not write its share: it gave no sign for "
            assert message.startswith(wanted), message
            assert not list(Path(directory).glob(".tmp-*"))
        dist.barrier()
        writing.let_go()
        message = caught(keeper.wait)
    assert "checkpoint-2 was not saved" in message, message
    assert keeper.steps() == [1]
    keeper.save(3, given(30))
    keeper.close()
    assert keeper.steps() == [1, 3]


def one_is_killed(directory: str, killed: int) -> None:
    """The other one notices at once, and what was there before is there still."""
    rank = dist.get_rank()
    keeper = checkpointer(directory, asynchronous=True)
    keeper.save(1, given(10))
    keeper.wait()
    with held() as writing:
        if rank != killed:
            writing.let_go()
        keeper.save(2, given(20))
        if rank == killed:
            writing.wait_until_writing()
            os.kill(os.getpid(), signal.SIGKILL)
    keeper._background.join()
    message = caught(keeper.check)
    wanted = (
        "SaveError: checkpoint-2 was not saved: rank 1: its process ended before it had written its share"
        if killed == 1
        else "SaveError: checkpoint-2 was not saved: rank 0 ended before it had put it in its place"
    )
    assert message == wanted, message
    assert keeper.steps() == [1]
    os._exit(0)  # without the other one there is no leaving the group
