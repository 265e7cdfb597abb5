"""Every implementation of a seam against the conformance suite of tr-core."""

import contextlib
import functools
import random

import numpy as np
import pytest
import torch
from torch import nn

from tr_ckpt import Checkpointer, RNGState
from tr_core import SingleDevice
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


def train_three_steps(strategy):
    """Train with and without clipping and a skipped update, and return everything that a strategy computed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    wrapped = strategy.prepare(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    found = []
    for max_norm, skip in ((None, None), (1e-3, torch.zeros(())), (None, torch.ones(()))):
        with strategy.accumulate(wrapped, sync=True):
            with strategy.autocast():
                loss = wrapped(torch.ones(2, 4)).square().mean()
            strategy.backward(loss)
        found += [loss.detach(), strategy.clip_grad_norm(wrapped, optimizer, max_norm)]
        found += [torch.tensor(strategy.step(optimizer, skip=skip)), *(p.detach().clone() for p in model.parameters())]
        optimizer.zero_grad(set_to_none=True)
    return [*found, *strategy.full_state_dict(wrapped).values()], sorted(strategy.state_parts(wrapped, optimizer))


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_one_process_trains_alike_with_the_strategies_of_both_packages(precision):
    found = []
    for kind in (SingleDevice, DDP):
        with contextlib.closing(kind(precision=precision, use_cpu=True)) as strategy:
            found.append(train_three_steps(strategy))
    of_core, of_dist = found
    assert of_core[1] == of_dist[1]
    assert all(map(torch.equal, of_core[0], of_dist[0]))


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_the_strategies_of_both_packages_refuse_a_precision_in_the_same_words(precision):
    texts = set()
    for kind in (SingleDevice, DDP):
        with pytest.raises(ValueError, match="precision|fp16=True") as refusal:
            kind(precision=precision, use_cpu=True)
        texts.add(str(refusal.value))
    assert len(texts) == 1
