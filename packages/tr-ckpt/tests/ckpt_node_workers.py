"""What the processes of two pretended machines do: ranks 0 and 1 on one, 2 and 3 on the other."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from ckpt_parts import number_of, parts
from ckpt_workers import FailsOn, caught, gather_objects, join

from tr_ckpt import Checkpointer, RNGState


def keeper_of(rank: int, directory: Path, **options: object) -> Checkpointer:
    place = {"rank": rank, "local_rank": rank % 2, "world_size": 4, "gather_objects": gather_objects}
    return Checkpointer(directory, **place, **options)


def save_on_two_machines(rank: int, rendezvous: str, folder: str, asynchronous: bool) -> None:
    """Save and restore together, fail together, and go on from what both machines have."""
    join(rank, 4, rendezvous)
    own = Path(folder) / f"machine-{rank // 2}"
    keeper = keeper_of(rank, own, keep_last=2, asynchronous=asynchronous)
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
    assert keeper_of(rank, own).restore(into) == 7
    message = caught(lambda: keeper.restore(into, own / "checkpoint-8"))
    assert "checkpoint-8 is not the same on every machine" in message, message
    message = caught(lambda: keeper.restore(into, "hub:me/mine"))
    assert "downloaded by one machine" in message, message
    dist.barrier()
    dist.destroy_process_group()
