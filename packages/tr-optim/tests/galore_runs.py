"""Train a small model with GaLore in one way or another; used by several test files."""

from __future__ import annotations

import torch
from torch import nn

from tr_optim import GaLoreAdamW

STEPS = 12

# How far two orders of the same operations may end apart: ten times what one rounding of the inputs (`noise=2**-24`)
# moves the weights by, 2e-6 where a basis turns on it. A learning rate that is 1% greater moves them by 9e-4.
ALIKE = 2e-5


def net(bias=True):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(48, 96, bias=bias), nn.Tanh(), nn.Linear(96, 64, bias=False), nn.Tanh(), nn.Linear(64, 80, bias=bias)
    )


def data(steps=STEPS):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(steps, 32, 48, generator=generator), torch.randn(steps, 32, 80, generator=generator)


def groups(model, **projection):
    projection = {"rank": 8, "update_proj_gap": 5, "scale": 1.0, "proj_type": "std", **projection}
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], **projection},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    optimizer,
    model,
    *,
    micro_batches=1,
    max_norm=None,
    noise=0.0,
    first=0,
    last=STEPS,
    schedule=None,
    norms=None,
):
    """Train for the steps from `first` to before `last`; return the weights."""
    inputs, targets = data()
    if noise:
        inputs = inputs * (1 + noise * torch.randn(inputs.shape, generator=torch.Generator().manual_seed(9)))
    for step in range(first, last):
        for k in range(micro_batches):
            x, y = inputs[step].chunk(micro_batches)[k], targets[step].chunk(micro_batches)[k]
            loss = (model(x) - y).square().mean() / micro_batches
            optimizer.backward(loss, last=k == micro_batches - 1)
        if max_norm is not None:
            if optimizer.fused_in_backward:
                norm = optimizer.clip_grad_norm(max_norm)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            if norms is not None:
                norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return weights(model)


def run(mode="step", *, kind=GaLoreAdamW, projection=(), lr=1e-2, **options):
    """Build model and optimizer, train, and return the weights."""
    about_training = ("micro_batches", "max_norm", "noise", "norms")
    how = {name: options.pop(name) for name in about_training if name in options}
    model = net()
    optimizer = kind(groups(model, **dict(projection)), lr, mode=mode, **options)
    return train(optimizer, model, **how)


def distance(first, second):
    return (first - second).abs().max().item()
