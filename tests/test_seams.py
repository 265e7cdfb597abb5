"""Every implementation of a seam against the conformance suite of tr-core."""

import functools

import pytest

from tr_ckpt import Checkpointer
from tr_core.testing import check_checkpointer, check_in_backward, check_strategy
from tr_dist import DDP
from tr_dist.testing import run_ranks
from tr_optim.galore import GaLoreAdafactor, GaLoreAdamW


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


@pytest.mark.parametrize("mode", ["deferred", "immediate"])
@pytest.mark.parametrize("kind", [GaLoreAdamW, functools.partial(GaLoreAdafactor, relative_step=False)])
def test_galore_keeps_the_promises_of_an_optimizer_in_the_backward(kind, mode):
    def make(model):
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        return kind([{"params": matrices, "rank": 2, "update_proj_gap": 2}, {"params": others}], 0.1, mode=mode)

    check_in_backward(make)
