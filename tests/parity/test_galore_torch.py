"""GaLore with compat="galore-torch" against galore-torch 1.0 itself."""

import pytest
import torch
from parity_libraries import modules_of
from torch import nn

from tr_optim import GaLoreAdafactor, GaLoreAdamW

STEPS = 12


@pytest.fixture(scope="module")
def galore_torch():
    """Return the reference's module of each optimizer, without its 8-bit ones, which import bitsandbytes."""
    names = ("adamw", "adafactor")
    return dict(zip(names, modules_of("galore_torch", *names), strict=True))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 32, bias=False), nn.Tanh(), nn.Linear(32, 32))


def groups(model, proj_type, gap=5):
    projection = {"rank": 6, "update_proj_gap": gap, "scale": 0.5, "proj_type": proj_type}
    return [
        {"params": [p for p in model.parameters() if p.dim() == 1]},
        {"params": [p for p in model.parameters() if p.dim() == 2], **projection},
    ]


def gradients(model):
    """Make the same gradients for both, so that rounding in one cannot turn a singular vector of the other."""
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(p.shape, generator=generator) for p in model.parameters()] for _ in range(STEPS)]


def train(model, optimizer):
    for step in gradients(model):
        for parameter, gradient in zip(model.parameters(), step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "right", "left", "full"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_that_of_galore_torch(galore_torch, proj_type, weight_decay):
    ours, theirs = net(), net()
    own = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    reference = galore_torch["adamw"].AdamW(groups(theirs, proj_type), **own, no_deprecation_warning=True)
    optimizer = GaLoreAdamW(groups(ours, proj_type), **own, compat="galore-torch")
    expected, found = train(theirs, reference), train(ours, optimizer)
    assert (expected - torch.cat([p.detach().flatten() for p in net().parameters()])).abs().max() > 1e-2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "right", "left", "full"])
@pytest.mark.parametrize("options", [{}, {"beta1": 0.9}, {"scale_parameter": False, "weight_decay": 0.1}])
def test_adafactor_is_that_of_galore_torch(galore_torch, proj_type, options):
    ours, theirs = net(), net()
    own = {"lr": 1e-2, "relative_step": False, **options}
    reference = galore_torch["adafactor"].Adafactor(groups(theirs, proj_type), **own)
    optimizer = GaLoreAdafactor(groups(ours, proj_type), **own, compat="galore-torch")
    expected, found = train(theirs, reference), train(ours, optimizer)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_rank_above_the_shorter_side_is_that_side(galore_torch):
    ours, theirs = net(), net()
    made = [groups(model, "std") for model in (ours, theirs)]
    for group in made:
        group[1]["rank"] = 100
    reference = galore_torch["adamw"].AdamW(made[1], lr=1e-2, eps=1e-6, no_deprecation_warning=True)
    optimizer = GaLoreAdamW(made[0], lr=1e-2, eps=1e-6, compat="galore-torch")
    torch.testing.assert_close(train(ours, optimizer), train(theirs, reference), rtol=0, atol=1e-6)
