"""What a loop may do with gradients that are gathered in the backward pass."""

import pytest
import torch
from torch import nn

from tr_optim import GaLoreAdamW


def build(dtype=torch.float32, mode="deferred"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24)).to(dtype)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return model, GaLoreAdamW([{"params": matrices, "rank": 4}, {"params": others}], 1e-2, mode=mode)


def batch(seed=0):
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_clipping_again_changes_nothing(micro_batches):
    weights = []
    for times in (1, 3):
        model, optimizer = build()
        for number in range(micro_batches):
            loss = 1e3 * model(batch(number)).square().mean()
            optimizer.backward(loss, last=number == micro_batches - 1)
        assert optimizer.clip_grad_norm(0.5) > 5
        for _ in range(times - 1):
            torch.testing.assert_close(optimizer.clip_grad_norm(0.5), torch.tensor(0.5), rtol=1e-4, atol=0)
        torch.testing.assert_close(optimizer.clip_grad_norm(None), torch.tensor(0.5), rtol=1e-4, atol=0)
        optimizer.step()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
    for once, thrice in zip(*weights, strict=True):
        torch.testing.assert_close(once, thrice, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["step", "deferred"])
def test_a_norm_that_float16_cannot_hold_is_measured(mode):
    model, optimizer = build(torch.float16, mode)
    optimizer.backward(model(batch().half()).float().sum() * 5000)
    gradients = [parameter.grad for parameter in (model[0].bias, model[2].bias)]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    norm = optimizer.clip_grad_norm(1.0)
    assert 65504 < norm < torch.inf


@pytest.mark.parametrize("mode", ["deferred", "immediate"])
def test_a_matrix_that_is_unfrozen_later_trains(mode):
    model, optimizer = build(mode=mode)
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.detach().clone()
    for unfrozen in (False, True):
        model[0].weight.requires_grad_(unfrozen)
        optimizer.backward(model(batch()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model[0].weight, frozen) is not unfrozen
    model[0].weight.requires_grad_(False)
    trained = model[0].weight.detach().clone()
    optimizer.backward(model(batch()).square().mean())
    optimizer.step()
    assert torch.equal(model[0].weight, trained)
