"""What the processes that tests start do: ranks of one machine and of two, and rivals for a folder's lock."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from ckpt_faults import Faults
from ckpt_parts import number_of, parts

from tr_ckpt import Checkpointer, FolderInUseError, RNGState, files, folder_lock, ranks, testing
from tr_ckpt.folder_lock import FolderLock

DIED = 9


def save_and_die(directory: str, at: int) -> None:
    """Save step 2 and leave before operation `at`, as a kill does: without any clearing up."""

    class Dying(Faults):
        def _fail(self, name: str, arguments: tuple[Any, ...]) -> None:
            os._exit(DIED)

    with Dying(at):
        Checkpointer(directory).save(2, parts(20))


def gather_objects(value: Any, group: Any = None) -> list[Any]:
    """Exchange picklable values; torch's own way of doing it needs NumPy, which these tests do not."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8)
    padded[: len(data)] = data
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    return [pickle.loads(bytes(one[: int(size)].tolist())) for one, size in zip(gathered, sizes, strict=True)]


STORE: Any = None  # a way to exchange values without a collective


def _enter(rank: int, world_size: int, meeting: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(meeting, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    global STORE
    STORE = dist.PrefixStore("objects", store)
    work(*arguments)
    dist.barrier()
    if torch.__version__ >= (2, 7):  # before, it may wait forever; the process ends without it
        dist.destroy_process_group()


@contextmanager
def _started(world_size: int, work: Callable[..., None], arguments: tuple[Any, ...]) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="tr_ranks_") as folder:
        context = torch.multiprocessing.start_processes(
            _enter,
            (world_size, str(Path(folder) / "meet"), work, arguments),
            nprocs=world_size,
            join=False,
            start_method="forkserver",
        )
        try:
            yield context
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def run(world_size: int, work: Callable[..., None], *arguments: Any, limit_s: float = 120) -> None:
    """Call `work(*arguments)` in so many processes of one gloo group; raises what one of them raised."""
    end = time.monotonic() + limit_s
    with _started(world_size, work, arguments) as context:
        while not context.join(timeout=max(0.0, end - time.monotonic())):
            assert time.monotonic() < end, f"{work.__name__} took longer than {limit_s} s"


def exit_codes(work: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Call `work(*arguments)` in two processes that may die, and return their exit codes."""
    with _started(2, work, arguments) as context:
        for process in context.processes:
            process.join(timeout=60)
        return [process.exitcode for process in context.processes]


def checkpointer(directory: str | Path, **options: Any) -> Checkpointer:
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "gather_objects": gather_objects}
    return Checkpointer(directory, **{**place, **options})


class FailsOn:
    """A part whose state cannot be taken on one rank."""

    def __init__(self, rank: int, error: Exception) -> None:
        self.rank = rank
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == self.rank:
            raise self.error
        return {"fine": True}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if dist.get_rank() == self.rank:
            raise self.error


class Gathers:
    """A part whose state all ranks make together, as that of a sharded optimizer may be."""

    def state_dict(self) -> dict[str, Any]:
        return {"gathered": gather_objects(f"mine of {dist.get_rank()}")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == {"gathered": ["mine of 0", "mine of 1"]}


def fail_before_a_state_that_all_make(directory: str) -> None:
    """Two ranks: on one a part fails, by its state or at the disk, that others of the same save follow."""
    for asynchronous in (False, True):
        fail_and_save(checkpointer(f"{directory}-{asynchronous}", asynchronous=asynchronous))


def fail_and_save(keeper: Checkpointer) -> None:
    def save(**given: Any) -> None:
        keeper.save(1, given)
        keeper.wait()

    for failing in (0, 1):
        first = FailsOn(failing, RuntimeError("no state"))
        message = caught(lambda first=first: save(first=first, optimizer=Gathers(), **parts(1)))
        assert "no state" in message, message
    create = files.create
    if dist.get_rank() == 0:
        files.create = lambda path: os.open("/dev/full", os.O_WRONLY)
    message = caught(lambda: save(**parts(1), optimizer=Gathers(), rng=RNGState()))
    assert "checkpoint-1 was not saved" in message, message
    files.create = create
    save(optimizer=Gathers())
    assert keeper.restore({"optimizer": Gathers()}) == 1
    dist.barrier()


def caught(work: Any) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def save_and_restore(directory: str) -> None:
    """Two ranks: save, draw, restore, draw the same; then a failure on either rank; then damage that one sees."""
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    keeper = checkpointer(directory, keep_last=2)
    for step in (1, 2, 3):
        keeper.save(step, {**parts(step), "rng": RNGState()})
    drawn = torch.rand(5)
    into = parts()
    assert keeper.restore({**into, "rng": RNGState()}) == 3
    assert into["model"].number == 3
    assert torch.equal(torch.rand(5), drawn)
    assert keeper.steps() == [2, 3]

    for failing in (0, 1):
        message = caught(lambda failing=failing: keeper.save(4, {"model": FailsOn(failing, RuntimeError("no state"))}))
        expected = (
            "RuntimeError: no state" if rank == failing else f"SaveError: checkpoint-4 was not saved: rank {failing}"
        )
        assert message.startswith(expected), message
        message = caught(lambda failing=failing: keeper.restore({"model": FailsOn(failing, RuntimeError("no load"))}))
        assert message.startswith(f"CheckpointError: {keeper.directory}/checkpoint-3 "), message
        assert "no load" in message, message
    assert keeper.steps() == [2, 3]
    assert not list(Path(directory).glob(".tmp-*"))
    dist.barrier()

    # What rank 1 alone reads is damaged: rank 0 must not restore it either.
    if rank == 0:
        path = Path(directory) / "checkpoint-3" / "rng-1.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    assert keeper.restore({**into, "rng": RNGState()}) == 2
    assert into["extra"].number == 2


def save_on_two_machines(folder: str, asynchronous: bool) -> None:
    """Save and restore together, fail together, and go on from what both machines have."""
    rank = dist.get_rank()
    own = Path(folder) / f"machine-{rank // 2}"
    keeper = checkpointer(own, local_rank=rank % 2, keep_last=2, asynchronous=asynchronous)
    committed: list[Path] = []
    torch.manual_seed(100 + rank)
    for step in (1, 2, 3):
        keeper.save(step, {**parts(step), "rng": RNGState()}, on_commit=committed.append)
    keeper.wait()
    assert [path.name for path in committed] == (["checkpoint-1", "checkpoint-2", "checkpoint-3"] if rank == 0 else [])
    drawn = torch.rand(5)
    into = parts()
    assert keeper.restore({**into, "rng": RNGState()}) == 3
    assert number_of(into) == 3
    assert torch.equal(torch.rand(5), drawn)
    assert keeper.steps() == [2, 3]
    written = {path.name for path in (own / "checkpoint-3").iterdir()}
    names = {
        f"rng-{number}.{kind}" for number in (rank // 2 * 2, rank // 2 * 2 + 1) for kind in ("json", "safetensors")
    }
    assert {name for name in written if name.startswith("rng")} == names
    dist.barrier()

    # A failure on one machine is one on both, and leaves neither with a checkpoint.
    message = caught(lambda: keeper.save(4, {"model": FailsOn(3, RuntimeError("no state"))}))
    assert message.startswith(("RuntimeError: no state", "SaveError: checkpoint-4 was not saved: rank 3")), message
    assert keeper.steps() == [2, 3]
    dist.barrier()

    # Damage on one machine has both go back.
    if rank == 2:
        path = own / "checkpoint-3" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    dist.barrier()
    assert keeper.restore({**into, "rng": RNGState()}) == 2
    assert number_of(into) == 2
    dist.barrier()

    # What one machine has not is gone on with by none.
    if rank == 0:
        shutil.rmtree(own / "checkpoint-2")
    dist.barrier()
    assert keeper.restore(into) is None
    message = caught(lambda: keeper.restore(into, own / "checkpoint-2"))
    assert "is not the same on every machine: nothing to restore on machine 0, a checkpoint on machine 1" in message
    dist.barrier()

    # Nor what is of another run there.
    shutil.rmtree(own, ignore_errors=True)
    dist.barrier()
    alone = Checkpointer(own) if rank % 2 == 0 else None
    if alone is not None:
        alone.save(7, parts(7))
        alone.save(8, parts(8 + rank))
    dist.barrier()
    assert checkpointer(own, local_rank=rank % 2).restore(into) == 7
    message = caught(lambda: keeper.restore(into, own / "checkpoint-8"))
    assert "checkpoint-8 is not the same on every machine" in message, message
    message = caught(lambda: keeper.restore(into, "hub:me/mine"))
    assert "downloaded by one machine" in message, message


def hold(folder: str, connection: Any) -> None:
    """Lock a folder, say so, and unlock it when told."""
    lock = FolderLock(Path(folder))
    lock.claim()
    connection.send("locked")
    connection.poll(120)
    lock.release()


def die_with(folder: str) -> None:
    """Lock a folder and end like a process that is killed."""
    FolderLock(Path(folder)).claim()
    os._exit(9)


def race(folders: list[str], barrier: threading.Barrier, results: Any) -> None:
    """Claim each folder at the same moment as others; say which this process got."""
    folder_lock.ENDING_S = 0.0
    folder_lock._POLL_S = 0.001
    won = []
    for folder in folders:
        lock = FolderLock(Path(folder))
        barrier.wait(60)
        try:
            lock.claim()
            lock.check()
            won.append(folder)
        except FolderInUseError:
            pass
        barrier.wait(60)
        lock.release()
    results.put(won)


SLOW_S, TIMEOUT_S = 4.0, 2.5  # of an operation on the disk, and of an exchange


def save_to_a_slow_disk(directory: str, asynchronous: bool) -> None:
    """Save, remove and restore with a disk on which an operation of rank 0 takes longer than any exchange may."""
    ranks.slow_work.HEAR_EVERY_S = 0.2
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    waits = {"make_folder", "write", "rename", "remove_folder", "list_folder"}

    def slow(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def wait_once(*given: Any, **more: Any) -> Any:
            if name in waits:
                waits.discard(name)
                time.sleep(SLOW_S)
            return operation(*given, **more)

        return wait_once

    if dist.get_rank() == 0:
        testing.replace_operations(slow, sorted(waits))
    keeper = checkpointer(
        directory, keep_last=1, asynchronous=asynchronous, gather_objects=lambda value: gather_objects(value, group)
    )
    keeper.save(1, {**parts(10), "rng": RNGState()})
    keeper.save(2, {**parts(20), "rng": RNGState()})
    keeper.wait()
    into = parts()
    assert keeper.restore(into) == 2
    assert number_of(into) == 20
    assert keeper.steps() == [2]
    keeper.close()
    assert dist.get_rank() or not waits
    dist.barrier()


def one_is_killed_while_it_writes(directory: str, killed: int) -> None:
    """The other one fails at once, and what was there before is there still."""
    keeper = checkpointer(directory)
    keeper.save(1, {**parts(10), "rng": RNGState()})
    if dist.get_rank() == killed:
        files.write = lambda descriptor, data: os.kill(os.getpid(), signal.SIGKILL)
    begun_s = time.monotonic()
    message = caught(lambda: keeper.save(2, {**parts(20), "rng": RNGState()}))
    assert message != "nothing raised"
    assert time.monotonic() - begun_s < 60, message  # a collective lasts half an hour
    assert keeper.steps() == [1]
    os._exit(0)  # without the other one there is no leaving the group
