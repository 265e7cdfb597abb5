"""A small model, one of its weights large enough for 8 bits, and gradients that do not depend on its weights."""

import copy
import io

import torch
from adapter_runs import check_same_tensors
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


def check_state(adapter, options, dtype, run=step):
    """Check that a state is saved as plain tensors, loaded as copies and leads to the same bits; return it.

    Args:
        adapter: the class of optimizer.
        options: what it is built with.
        dtype: of the weights.
        run: makes the steps of a range, and returns what is to be the same.
    """
    whole, first = net(dtype), net(dtype)
    expected = run(whole, reference := adapter(whole.parameters(), **options))
    optimizer = adapter(first.parameters(), **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    step(first, optimizer, range(7))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second, untouched = copy.deepcopy(first), copy.deepcopy(saved["state"])
    resumed = adapter(second.parameters(), **options)
    resumed.load_state_dict(saved)
    assert torch.equal(run(second, resumed, range(7, 12)), expected)
    check_same_tensors(resumed.state_dict()["state"], reference.state_dict()["state"])
    check_same_tensors(saved["state"], untouched)
    return saved["state"]
