"""Every implementation of a seam against the conformance suite of tr-core."""

import functools
import random

import numpy as np
import pytest
import torch

from tr_ckpt import Checkpointer, RNGState
from tr_core.testing import RandomState, check_checkpointer, check_in_backward, check_strategy
from tr_dist import DDP
from tr_dist.testing import run_ranks
from tr_optim import GaLoreAdafactor, GaLoreAdamW


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


def of_trainer():
    return RandomState(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def draw():
    numbers = [random.gauss(0, 1), np.random.randn(), torch.rand(()).item()]
    return [*numbers, torch.rand((), device=of_trainer().device).item()]


@pytest.mark.parametrize(("save", "restore"), [(RNGState, of_trainer), (of_trainer, RNGState)])
def test_random_generators_saved_by_a_trainer_or_a_loop_by_hand_are_restored_by_the_other(save, restore, tmp_path):
    draw()  # an odd count: each generator of normal numbers keeps the second of a pair
    Checkpointer(tmp_path).save(1, {"rng": save()})
    expected = [draw() for _ in range(2)]
    Checkpointer(tmp_path).restore({"rng": restore()})
    assert [draw() for _ in range(2)] == expected
