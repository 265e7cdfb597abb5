"""Gradients applied in the backward pass over several gloo processes: APOLLO, Fira, and GaLore with whole gradients."""

import pytest
import torch
from shared.projections import STEPS, Counted, data, groups, weights
from torch import nn

from tr_dist import DDP
from tr_dist.testing import run_ranks
from tr_optim import APOLLOAdamW, FiraAdamW, GaLoreAdafactor, GaLoreAdamW

KINDS = {
    "apollo": (APOLLOAdamW, {}),
    "fira": (FiraAdamW, {}),
    "galore": (GaLoreAdamW, {"reduction": "whole"}),
    "galore_adafactor": (GaLoreAdafactor, {"reduction": "whole", "relative_step": False}),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 32, bias=False), nn.Tanh(), nn.Linear(32, 8))


def train(name, collectives, rank, world_size, micro_batches, max_norm):
    kind, options = KINDS[name]
    model = net()
    # A seed by which no projection is small by chance, so that rounding is not made large.
    optimizer = kind(groups(model), 1e-2, mode="immediate", weight_decay=0.1, seed=1, **options)
    if collectives is not None:
        optimizer.bind(collectives)
    optimizer.clip_to(max_norm)
    inputs, targets = data()
    norms = []
    for step in range(STEPS):
        xs = inputs[step].chunk(world_size)[rank].chunk(micro_batches)
        ys = targets[step].chunk(world_size)[rank].chunk(micro_batches)
        for k in range(micro_batches):
            loss = (model(xs[k]) - ys[k]).square().mean() / micro_batches
            optimizer.backward(loss, last=k == micro_batches - 1)
        norms.append(optimizer.clip_grad_norm(max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return weights(model), norms


def train_on_rank(*how):
    with DDP(use_cpu=True) as strategy:
        collectives = Counted(strategy)
        return *train(how[0], collectives, strategy.rank, strategy.world_size, *how[1:]), collectives.elements


@pytest.mark.parametrize(
    ("name", "world_size", "micro_batches", "max_norm"),
    [
        ("apollo", 2, 1, None),
        ("apollo", 3, 2, 0.1),
        ("fira", 2, 1, 0.1),
        ("fira", 2, 3, None),
        ("galore", 2, 1, None),
        ("galore", 2, 3, None),
        ("galore_adafactor", 2, 2, None),
    ],
)
def test_ranks_end_as_one_process_with_the_union_of_their_batches(name, world_size, micro_batches, max_norm):
    alone, norms = train(name, None, 0, 1, 1, max_norm)
    results = run_ranks(train_on_rank, world_size, name, micro_batches, max_norm)
    for shared, found, _ in results:
        assert torch.equal(shared, results[0][0])
        assert (shared - alone).abs().max() < 1e-6
        if micro_batches == 1 or not name.startswith("galore"):
            assert found == pytest.approx(norms, rel=1e-5)
    assert (alone - weights(net())).abs().max() > 1e-2


def test_each_gradient_is_exchanged_once_in_a_step_and_twice_where_it_is_clipped():
    count = sum(p.numel() for p in net().parameters())
    for max_norm, times in ((None, 1), (0.1, 2)):
        for _, _, elements in run_ranks(train_on_rank, 2, "apollo", 1, max_norm):
            assert sum(elements) == STEPS * times * count


def unused_on_rank(last_only):
    with DDP(use_cpu=True) as strategy:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
        optimizer = FiraAdamW([{"params": list(model.parameters()), "rank": 2}], 1e-2, mode="immediate")
        optimizer.bind(strategy)
        optimizer.clip_to(1.0)
        x = torch.ones(4, 8) * (1 + strategy.rank)
        if last_only:  # of a step of two micro-batches
            optimizer.backward(model[1](model[0](x)).square().mean(), last=False)
        optimizer.backward(model[0](x).square().mean())
        return weights(model)


def test_a_parameter_without_a_gradient_is_an_error_in_words():
    with pytest.raises(RuntimeError, match="1 trainable parameters got no gradient on this rank"):
        run_ranks(unused_on_rank, 2, False)


def test_a_parameter_of_earlier_micro_batches_alone_is_updated_alike_on_all_ranks():
    first, second = run_ranks(unused_on_rank, 2, True)
    assert torch.equal(first, second)
    torch.manual_seed(0)
    before = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    assert not torch.equal(first[64:], weights(before)[64:])
