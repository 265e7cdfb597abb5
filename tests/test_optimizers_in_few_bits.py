"""Bases and weights in few bits, found and rounded lazily: replicas hold the same bits all the same."""

import copy

import pytest
import torch
from torch import nn

from tr_dist import DDP
from tr_dist.testing import run_ranks
from tr_optim import AdaLomo, GaLoreAdamW, Lomo

STEPS = 24
LAZY = {"refresh": "lazy", "refresh_cosine": 0.05, "refresh_window": 2}
SETTINGS = {
    "lazy": LAZY,
    "int8": {"basis_dtype": "int8"},
    "int4, lazy": {"basis_dtype": "int4", **LAZY},
    "whole gradients exchanged": {"basis_dtype": "int8", "reduction": "whole", **LAZY},
}


def net():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 8))
    return layers.to(torch.bfloat16)


def build(model, kind, options):
    if kind is not GaLoreAdamW:
        return kind(model.parameters(), 1e-2, **options)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [
        {"params": matrices, "rank": 4, "update_proj_gap": 3, "scale": 1.0},
        {"params": [p for p in model.parameters() if p.dim() == 1]},
    ]
    return GaLoreAdamW(groups, 1e-2, mode="deferred", **options)


def train(model, optimizer, rank, first=0, last=STEPS):
    for step in range(first, last):
        generator = torch.Generator().manual_seed(2 * step + rank)
        x, y = torch.randn(6, 16, generator=generator), torch.randn(6, 8, generator=generator)
        loss = (model(x.to(torch.bfloat16)) - y).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train_on_rank(kind, options, resume_at):
    with DDP(use_cpu=True) as strategy:
        model = net()
        optimizer = build(model, kind, options)
        optimizer.bind(strategy)
        train(model, optimizer, strategy.rank, last=resume_at)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        alone = train(model, optimizer, strategy.rank, first=resume_at)
        state = optimizer.state[model[0].weight]
        doublings = state["refreshed"][1].item() if "refreshed" in state else None
        model.load_state_dict(saved[0])
        fresh = build(model, kind, options)
        fresh.bind(strategy)
        fresh.load_state_dict(saved[1])
        return alone, train(model, fresh, strategy.rank, first=resume_at), doublings


@pytest.mark.parametrize("setting", SETTINGS)
def test_ranks_of_galore_hold_the_same_bits_and_go_on_with_them(setting):
    options = {"stochastic_rounding": True, **SETTINGS[setting]}
    (first, gone_on, doublings), (second, other, _) = run_ranks(train_on_rank, 2, GaLoreAdamW, options, 13)
    assert torch.equal(first, second)
    assert torch.equal(first, gone_on)
    assert torch.equal(first, other)
    assert (doublings or 0) > 0 or "refresh" not in options


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
def test_ranks_of_lomo_round_alike_and_go_on_so(kind):
    (first, gone_on, _), (second, _, _) = run_ranks(train_on_rank, 2, kind, {"stochastic_rounding": True}, 13)
    nearest = run_ranks(train_on_rank, 2, kind, {}, 13)[0][0]
    assert torch.equal(first, second)
    assert torch.equal(first, gone_on)
    assert not torch.equal(first, nearest)
