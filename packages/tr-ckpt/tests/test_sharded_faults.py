"""Ranks that die, disks that fill up and files that are damaged while state is in shards."""

import ckpt_shard_faults
import pytest
import torch
from ckpt_parts import flip, listed
from ckpt_shards import Holder, trains_sharded
from ckpt_workers import exit_codes, run

from tr_ckpt import Checkpointer, DamagedCheckpointError


def ranks_of_a_death(directory, victim, at, asynchronous=False):
    """Run two ranks of which one may die; returns their exit codes, and what each did and said."""
    codes = exit_codes(ckpt_shard_faults.die_in_a_save, str(directory), victim, at, asynchronous)
    told = []
    for rank in (0, 1):
        path = directory.with_name(f"{directory.name}.rank-{rank}")
        operations, _, said = path.read_text(encoding="utf-8").partition("\n") if path.exists() else ("0", "", "")
        told.append((int(operations), said))
    return codes, told


def value_of(directory, step):
    held = {"held": Holder({"spread": torch.zeros(6, 4), "plain": torch.zeros(3)})}
    assert Checkpointer(directory).restore(held) == step
    values = {float(number) for tensor in held["held"].tensors.values() for number in tensor.flatten()}
    assert len(values) == 1
    return values.pop()


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    """How many operations on the file system each rank does in one save."""
    codes, told = ranks_of_a_death(tmp_path_factory.mktemp("count") / "run", 1, None)
    assert codes == [0, 0]
    assert [said for _, said in told] == ["saved", "saved"]
    return [count for count, _ in told]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_killed_before_any_operation_of_its_save_leaves_the_previous_checkpoint(
    tmp_path, operations, asynchronous
):
    assert operations[1] == 4  # create, header, tensor, sync: a shard of one tensor and nothing else
    for at in range(1, operations[1] + 1):
        directory = tmp_path / f"run-{at}"
        codes, told = ranks_of_a_death(directory, 1, at, asynchronous)
        assert codes == [0, -9]
        assert told[0][1] not in ("", "saved")
        assert Checkpointer(directory).steps() == [1]
        assert value_of(directory, 1) == 10.0
        # What the dead left goes at the next save, and the next save works.
        Checkpointer(directory).save(2, {"held": Holder({"plain": torch.zeros(3)})})
        assert listed(directory) == ["checkpoint-1", "checkpoint-2"]


def test_rank_0_killed_in_a_save_leaves_the_previous_checkpoint_or_the_whole_new_one(tmp_path, operations):
    seen = set()
    for at in range(2, operations[0] + 1, 5):
        directory = tmp_path / f"run-{at}"
        codes, _ = ranks_of_a_death(directory, 0, at)
        assert codes == [-9, 0]
        steps = Checkpointer(directory).steps()
        assert steps in ([1], [1, 2])
        assert value_of(directory, steps[-1]) == 10.0 * steps[-1]
        seen.add(len(steps))
    assert 1 in seen


def test_a_full_disk_of_one_rank_is_told_to_all_and_nothing_is_left(tmp_path):
    run(2, ckpt_shard_faults.fail_together, str(tmp_path))


@pytest.fixture
def twice(tmp_path):
    run(2, ckpt_shard_faults.save_twice, str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("file", "is_there"),
    [
        ("held-shard-0.safetensors", True),
        ("held-shard-1.safetensors", True),
        ("held.shards.json", True),
        ("held-shard-1.safetensors", False),
    ],
)
def test_a_damaged_file_is_named_by_all_ranks_and_the_checkpoint_before_is_taken(twice, file, is_there):
    path = twice / "checkpoint-2" / file
    flip(path) if is_there else path.unlink()
    damage = f"{file} was changed after it was written" if is_there else f"{file} is missing"
    run(2, ckpt_shard_faults.restore_what_is_whole, str(twice), damage)
    with pytest.raises(DamagedCheckpointError, match=damage):
        Checkpointer(twice).restore({"held": Holder({})}, twice / "checkpoint-2")


@pytest.mark.parametrize("file", ["held-shard-0.safetensors", "held-shard-1.safetensors", "held.shards.json"])
def test_a_damaged_file_keeps_no_rank_in_a_state_dict_that_all_make(twice, file):
    flip(twice / "checkpoint-2" / file)
    run(2, ckpt_shard_faults.restore_what_is_whole_by_gathering, str(twice), f"{file} was changed after it was written")


def test_each_rank_reads_back_its_share_before_older_checkpoints_go(tmp_path):
    run(2, ckpt_shard_faults.read_back_shares, str(tmp_path / "run"))


def test_a_state_dict_that_fails_on_one_rank_is_told_to_all(twice):
    run(2, ckpt_shard_faults.restore_what_fails_on_one_rank, str(twice))


def test_shards_may_change_as_soon_as_a_save_in_the_background_has_returned(tmp_path):
    run(2, ckpt_shard_faults.save_and_change_at_once, str(tmp_path))


def test_a_save_gathers_nothing_and_a_restore_reads_no_more_than_it_needs(tmp_path):
    run(2, ckpt_shard_faults.save_without_a_collective, str(tmp_path))
    for world_size in (1, 3, 4):
        run(world_size, ckpt_shard_faults.count_what_is_read, str(tmp_path))


@trains_sharded
def test_ranks_that_do_not_hold_the_same_are_told_what_differs(tmp_path):
    (tmp_path / "run").mkdir()
    run(2, ckpt_shard_faults.hold_other_tensors, str(tmp_path / "run"))
    assert (tmp_path / "run.done").exists()
