"""Every implementation of a seam against the conformance suite of tr-core."""

import functools

import pytest

from tr_ckpt import Checkpointer
from tr_core.testing import check_checkpointer, check_strategy
from tr_dist import DDP
from tr_dist.testing import run_ranks


def ddp_keeps_its_promises():
    strategy = DDP(use_cpu=True)
    check_strategy(strategy)
    strategy.close()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_keeps_the_promises_of_a_strategy(world_size):
    run_ranks(ddp_keeps_its_promises, world_size, timeout_s=90)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_local_checkpointer_keeps_the_promises_of_a_checkpointer(asynchronous, tmp_path):
    check_checkpointer(functools.partial(Checkpointer, tmp_path, keep_last=2, asynchronous=asynchronous))
