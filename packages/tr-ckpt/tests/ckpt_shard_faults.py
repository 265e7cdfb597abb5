"""What the ranks of tests that kill, break or watch a sharded save do."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import ckpt_faults
import ckpt_shards
import ckpt_workers
import pytest
import torch
import torch.distributed as dist
from ckpt_faults import Faults
from ckpt_parts import listed
from ckpt_shards import Buffers, Counted, Holder, keep
from ckpt_workers import caught, checkpointer

from tr_ckpt import CheckpointError, discovery, restoring, untrusted
from tr_ckpt.errors import Damage
from tr_ckpt.sharded import stateful


def held(value: float) -> dict[str, Any]:
    """One part: a tensor of 6 rows over all ranks, and one that is no DTensor."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    spread = distribute_tensor(torch.full((6, 4), value), mesh, [Shard(0)])
    return {"held": Holder({"spread": spread, "plain": torch.full((3,), value)})}


class Killing(Faults):
    """Kill this process before an operation, as `kill -9` does."""

    def _fail(self, name: str, arguments: tuple[Any, ...]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_a_save(directory: str, victim: int, at: int | None, asynchronous: bool) -> None:
    """Save step 1; then save step 2, in which one rank dies before an operation; None counts the operations."""
    rank = dist.get_rank()
    keeper = checkpointer(directory, asynchronous=asynchronous)
    keeper.save(1, held(10.0))
    keeper.wait()
    with Killing(at if rank == victim else None) as faults:
        try:
            keeper.save(2, held(20.0))
            keeper.wait()
            said = "saved"
        except Exception as error:  # whatever gloo says of a peer that is gone
            said = f"{type(error).__name__}: {error}"
    Path(f"{directory}.rank-{rank}").write_text(f"{len(faults.log)}\n{said}", encoding="utf-8")
    if at is None:
        dist.barrier()
    os._exit(0)


def fail_together(directory: str) -> None:
    """Save step 1; then a disk that is full for one rank, which all ranks are told of; then save again."""
    keeper = checkpointer(directory)
    keeper.save(1, held(10.0))
    for failing in (0, 1):
        mine = dist.get_rank() == failing
        with Faults(at=1 if failing == 1 else 8, mode="full") if mine else Faults():
            message = caught(lambda: keeper.save(2, held(20.0)))
        assert "No space left on device" in message, message
        assert message.startswith("OSError" if mine else f"SaveError: checkpoint-2 was not saved: rank {failing}")
        assert keeper.steps() == [1]
    dist.barrier()
    assert listed(Path(directory)) == ["checkpoint-1"]
    keeper.save(2, held(20.0))
    assert keeper.steps() == [1, 2]


def save_twice(directory: str) -> None:
    for step in (1, 2):
        checkpointer(directory).save(step, held(10.0 * step))


def restore_what_is_whole(directory: str, damage: str) -> None:
    """Restore the newest valid one of steps 1 and 2; then name the damaged one outright."""
    found = held(0.0)
    assert checkpointer(directory).restore(found) == 1
    assert torch.equal(found["held"].tensors["spread"].full_tensor(), torch.full((6, 4), 10.0))
    message = caught(lambda: checkpointer(directory).restore(held(0.0), f"{directory}/checkpoint-2"))
    assert message.startswith("DamagedCheckpointError"), message
    assert damage in message, message


def read_back_shares(directory: str) -> None:
    """Save over a limit; each rank reads back what it wrote, and rank 0 the files of all."""
    keeper, read = checkpointer(directory, keep_last=1), []
    damages = discovery.damages
    keeper.save(1, held(10.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "damages", lambda *given: read.append(sorted(given[2])) or damages(*given))
        keeper.save(2, held(20.0))
    own = f"held-shard-{dist.get_rank()}.safetensors"
    assert read == [[[own, "held.json", "held.shards.json"], [own]][dist.get_rank()]]
    assert keeper.steps() == [2]
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(discovery, "damages", lambda *given: [Damage(own, "content", "it is damaged, it is said")])
        keeper.save(3, held(30.0))
    assert keeper.steps() == [2, 3]  # what one rank finds counts for all


class Gathered(Holder):
    """A part whose `state_dict` gathers, as that of a model whose checkpoints hold full weights."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        for tensor in self.tensors.values():
            if hasattr(tensor, "full_tensor"):
                tensor.full_tensor()
        return state


def restore_what_is_whole_by_gathering(directory: str, damaged: str) -> None:
    """Restore the newest valid one of steps 1 and 2 into a part whose `state_dict` is collective."""
    found = {"held": Gathered(held(0.0)["held"].tensors)}
    assert checkpointer(directory).restore(found) == 1
    assert torch.equal(found["held"].tensors["spread"].full_tensor(), torch.full((6, 4), 10.0))
    message = caught(lambda: checkpointer(directory).restore(found, f"{directory}/checkpoint-2"))
    assert message.startswith("DamagedCheckpointError"), message
    assert damaged in message, message


class Failing(Gathered):
    """A part whose `state_dict` fails on rank 1, after it has made its part of the exchange."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if dist.get_rank() == 1:
            raise ValueError("no state today")
        return state


def restore_what_fails_on_one_rank(directory: str) -> None:
    parts = {"held": Failing(held(0.0)["held"].tensors)}
    message = caught(lambda: checkpointer(directory).restore(parts, f"{directory}/checkpoint-1"))
    told = f"CheckpointError: {directory}/checkpoint-1 was not restored: rank 1: ValueError: no state today"
    assert message == ("ValueError: no state today" if dist.get_rank() == 1 else told)


def save_and_change_at_once(directory: str) -> None:
    """Save in the background and write over every shard before anything is on the disk."""
    parts = held(10.0)
    keeper = checkpointer(directory, asynchronous=True)
    with ckpt_faults.held():  # until the shards have changed
        keeper.save(1, parts)
        for tensor in parts["held"].tensors.values():
            tensor.fill_(-1.0)
    keeper.save(2, parts)
    keeper.wait()
    assert keeper.steps() == [1, 2]
    for step, value in ((1, 10.0), (2, -1.0)):
        found = held(0.0)
        assert keeper.restore(found, f"{directory}/checkpoint-{step}") == step
        for tensor in found["held"].tensors.values():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            assert torch.equal(whole, torch.full_like(whole, value))


SENT: list[int] = []  # bytes of each value this rank gave to the other


def gather_through_the_store(value: Any) -> list[Any]:
    """Exchange values with no collective of the process group."""
    data = pickle.dumps(value)
    ckpt_workers.STORE.set(f"{len(SENT)}/{dist.get_rank()}", data)
    values = [pickle.loads(ckpt_workers.STORE.get(f"{len(SENT)}/{rank}")) for rank in range(dist.get_world_size())]
    SENT.append(len(data))
    return values


def save_without_a_collective(directory: str) -> None:
    """Save, and restore in the same layout, without a collective and without reading what is not needed."""
    from torch.distributed.tensor.debug import CommDebugMode

    parts = wide()
    local = sum(tensor.to_local().nbytes for tensor in parts["held"].state_dict().values())
    with CommDebugMode() as communication:
        checkpointer(directory, gather_objects=gather_through_the_store).save(1, parts)
    assert communication.get_total_counts() == 0
    assert max(SENT) < 4000
    with CommDebugMode() as communication:
        parts["held"].wide.full_tensor()
    assert communication.get_total_counts() == 1  # it does see them

    assert restored_bytes(directory) == local


def restored_bytes(directory: str) -> int:
    """Restore into tensors over all ranks and return what was read out of the files on this one."""
    Counted.taken.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(restoring, "CheckpointReader", Counted)
        assert checkpointer(directory).restore(wide(fill=0.0)) == 1
    return sum(Counted.taken)


def wide(fill: float = 1.0) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sides = {"wide": Shard(1), "tall": Shard(0)}
    return {
        "held": Buffers(
            {name: distribute_tensor(torch.full((120, 60), fill), mesh, [side]) for name, side in sides.items()}
        )
    }


def count_what_is_read(directory: str) -> None:
    """Read what another number of ranks saved: this rank's share of the numbers and no more."""
    read = restored_bytes(directory)
    assert read == 2 * 120 * 60 * 4 // dist.get_world_size(), read


def hold_too_much(directory: str) -> None:
    """Save a part whose index no restore would read; all ranks are told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(untrusted, "MOST_JSON_BYTES", 200)
        message = caught(lambda: checkpointer(directory).save(1, held(1.0)))
    assert message.startswith(("CheckpointError: ", "SaveError: ")[dist.get_rank()]), message
    assert "of held are takes" in message, message
    assert "bytes of JSON, and at most 200 are read back; give shorter names, or lengths that the ranks" in message


def hold_other_tensors(directory: str) -> None:
    """Give what the ranks do not agree on; nothing is saved, and all ranks are told why."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))

    def spread(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, placement: Any = None) -> torch.Tensor:
        return DTensor.from_local(torch.zeros(shape, dtype=dtype), mesh, [placement or Shard(0)], run_check=False)

    def refused(tensors: dict[str, torch.Tensor]) -> str:
        return caught(lambda: checkpointer(directory).save(1, {"held": Holder(tensors)}))

    for tensors, expected in [
        (
            {f"stage{rank}": spread((2, 2))},
            "held: 'held.0.stage0' is [4, 2] of torch.float32 on rank 0 and absent on rank 1; all ranks must hold the "
            "same DTensors (stages of a pipeline are not supported)",
        ),
        (
            {"w": spread((2, 2), (torch.float32, torch.float64)[rank])},
            "held: 'held.0.w' is [4, 2] of torch.float32 on rank 0 and [4, 2] of torch.float64 on rank 1",
        ),
        (
            {"w": spread((2, 2)) if rank == 0 else torch.zeros(4, 2)},
            "held holds DTensors, but none on rank 1; all ranks must hold the same state",
        ),
        (
            {"w": torch.zeros(4, 2) if rank == 0 else spread((2, 2))},
            "held holds DTensors, but none on rank 0; all ranks must hold the same state",
        ),
        (
            {"w": spread((2, 2), placement=Partial())},
            "held.held[0].w is a DTensor with the placement Partial(sum): no rank has its numbers yet; give "
            "tensor.redistribute(placements=[Replicate(), ...]) in state_dict()",
        ),
        (
            {"w": spread((2, 2) if rank == 0 else (1, 2))},
            "held: 'held.0.w' is [4, 2] of torch.float32 on rank 0 and [2, 2] of torch.float32 on rank 1",
        ),
        (
            {
                "w": DTensor.from_local(
                    torch.zeros(2 - rank, 2), mesh, [Shard(0)], shape=torch.Size((4, 2)), stride=(2, 1)
                )
            },
            "held: the shard of 'held.0.w' has the shape [1, 2] where its placements say [2, 2]; give shape= and "
            "stride= to DTensor.from_local when shards are uneven",
        ),
    ]:
        message = refused(tensors)
        assert expected in message, message
    dist.barrier()
    assert listed(Path(directory)) == []
    # State kept by names is none of a plain optimizer, whose parameters have numbers.
    model, optimizer = ckpt_shards.build_sharded(1)
    ckpt_shards.train(model, optimizer, range(1))
    checkpointer(directory).save(2, stateful(model, optimizer))
    with pytest.raises(CheckpointError, match="is of no parameter of this optimizer, whose parameters are DTensors"):
        checkpointer(directory).restore({"optimizer": optimizer})
    keep(f"{directory}.done", True)
