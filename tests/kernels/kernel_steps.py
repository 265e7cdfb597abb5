"""A small model, one of its weights large enough for 8 bits, and gradients that do not depend on its weights."""

import torch
from torch import nn

OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 8)).to(dtype)


def step(model, optimizer, steps=range(12)):
    generator = torch.Generator().manual_seed(1)
    gradients = [[torch.randn(p.shape, generator=generator) * 0.01 for p in model.parameters()] for _ in range(12)]
    for number in steps:
        for parameter, gradient in zip(model.parameters(), gradients[number], strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return torch.cat([p.detach().flatten().float() for p in model.parameters()])
