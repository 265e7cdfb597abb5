"""Machines that share no file system, each with whole checkpoints in a folder of its own."""

import ckpt_workers
import pytest
from ckpt_parts import number_of, parts
from ckpt_workers import run

from tr_ckpt import Checkpointer, RNGState
from tr_ckpt.ranks import NodeRanks


@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_machines_save_restore_and_fail_together(tmp_path, asynchronous):
    run(4, ckpt_workers.save_on_two_machines, str(tmp_path), asynchronous)
    # One process goes on from what either machine has.
    into = parts()
    assert Checkpointer(tmp_path / "machine-1").restore({**into}, tmp_path / "machine-1" / "checkpoint-7") == 7
    assert number_of(into) == 7


def test_on_one_machine_it_makes_no_difference(tmp_path):
    def places(value):
        return [(0, 0), (0, 1)]

    assert NodeRanks.find(1, 1, 2, places).is_one_of_several is False
    keeper = Checkpointer(tmp_path, rank=0, local_rank=0, world_size=1, gather_objects=lambda value: [value])
    keeper.save(1, {**parts(1), "rng": RNGState()})
    assert keeper.restore(parts()) == 1


def test_ranks_of_a_machine_that_do_not_follow_one_another_are_refused():
    places = [(0, 0), (0, 1), (1, 1), (3, 0)]
    with pytest.raises(ValueError, match=r"rank 2 has local_rank 1, and its machine has the local ranks \[1\]"):
        NodeRanks.find(2, 1, 4, lambda value: places)
