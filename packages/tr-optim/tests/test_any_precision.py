"""AdamW with moments of any floating point type: AdamW's numbers, and what low precision does not lose."""

import pytest
import torch
from torch import nn

from tr_optim.any_precision import AnyPrecisionAdamW

ADAM = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def train(model, optimizer, steps=20):
    for step in range(steps):
        inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(model.weight.dtype)
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


def layer(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(8, 4).to(dtype)


def test_in_float32_it_is_adamw():
    ours, theirs = layer(), layer()
    found = train(ours, AnyPrecisionAdamW(ours.parameters(), **ADAM))
    torch.testing.assert_close(found, train(theirs, torch.optim.AdamW(theirs.parameters(), **ADAM)), rtol=0, atol=2e-6)


def test_moments_have_the_types_that_are_given():
    model = layer()
    types = {"momentum_dtype": "bfloat16", "variance_dtype": torch.float16, "compensation_buffer_dtype": "float32"}
    optimizer = AnyPrecisionAdamW(model.parameters(), use_kahan_summation=True, **types)
    train(model, optimizer, 2)
    for state in optimizer.state.values():
        assert state["exp_avg"].dtype == torch.bfloat16
        assert state["exp_avg_sq"].dtype == torch.float16
        assert state["compensation"].dtype == torch.float32
    expected = optimizer.expected_bytes()[1]
    assert expected == sum(v.numel() * v.element_size() for s in optimizer.state.values() for v in s.values())


def test_with_the_kahan_sum_bfloat16_weights_follow_updates_below_their_precision():
    def moved(**options):
        weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
        optimizer = AnyPrecisionAdamW([weight], lr=1e-4, **options)
        for _ in range(200):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return (1 - weight.detach().float()).mean().item()

    assert moved() == 0  # rounded off, each time
    assert moved(use_kahan_summation=True) == pytest.approx(0.02, rel=0.1)
