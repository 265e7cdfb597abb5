"""Copies of optimizers go on as the originals do, and a group that is refused is not there."""

import copy
import pickle

import fused_models
import pytest
import torch
from torch import nn

from tr_optim import Adafactor, AdaLomo, AdamW8bit, APOLLOAdamW, FiraAdamW, GaLoreAdamW, GaLoreAdamW8bit, Lomo

FUSED = {
    "lomo": (Lomo, {"lr": 0.1}),
    "lomo, all set": (Lomo, {"lr": 0.1, "weight_decay": 0.1, "clip_grad_norm": 0.05, "nonfinite": "skip_step"}),
    "lomo, clipped by value": (Lomo, {"lr": 0.1, "clip_grad_value": 1e-3, "accumulate": "store"}),
    "lomo, rounded": (Lomo, {"lr": 0.1, "stochastic_rounding": True, "seed": 3}),
    "adalomo": (AdaLomo, {"lr": 1e-2, "clip_grad_norm": 0.05}),
    "adalomo, rounded": (AdaLomo, {"lr": 1e-2, "stochastic_rounding": True, "seed": 3}),
}


def train(model, optimizer, steps):
    dtype = model.head.weight.dtype
    for step in steps:
        optimizer.backward(model(model.batch(step).to(dtype)).square().mean())
        optimizer.step()


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("name", FUSED)
def test_a_copy_goes_on_as_the_original_and_leaves_that_alone(name, copied):
    kind, options = FUSED[name]
    dtype = torch.bfloat16 if "rounded" in name else torch.float32
    model = fused_models.build().to(dtype)
    optimizer = kind(model.parameters(), **options)
    train(model, optimizer, range(2))
    after_two = weights(model)
    other, its_optimizer = copied((model, optimizer))
    train(other, its_optimizer, range(2, 4))
    for now, then in zip(weights(model), after_two, strict=True):
        assert torch.equal(now, then)
    train(model, optimizer, range(2, 4))
    for expected, found in zip(weights(model), weights(other), strict=True):
        assert torch.equal(expected, found)


def test_a_copy_does_not_take_over_what_an_unfinished_step_has_stored():
    model = fused_models.build()
    optimizer = Lomo(model.parameters(), 0.1, accumulate="store")
    optimizer.backward(model(model.batch(0)).square().mean(), last=False)
    other, its_optimizer = copy.deepcopy((model, optimizer))
    its_optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="call optimizer.backward"):
        its_optimizer.step()
    train(other, its_optimizer, range(1))


MATRIX, VECTOR = (6, 4), (6,)
PROJECTED = {"rank": 2}
REFUSED = {
    "GaLoreAdamW": (GaLoreAdamW, lambda: {"params": [nn.Parameter(torch.ones(VECTOR))], **PROJECTED}),
    "GaLoreAdamW8bit": (GaLoreAdamW8bit, lambda: {"params": [nn.Parameter(torch.ones(6))], "min_8bit_size": -1}),
    "APOLLOAdamW": (APOLLOAdamW, lambda: {"params": [nn.Parameter(torch.ones(VECTOR))], **PROJECTED}),
    "FiraAdamW": (FiraAdamW, lambda: {"params": [nn.Parameter(torch.ones(VECTOR))], **PROJECTED}),
    "AdamW8bit": (AdamW8bit, lambda: {"params": [nn.Parameter(torch.ones(6, dtype=torch.complex64))]}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_group_that_is_refused_is_not_there(name):
    kind, refused = REFUSED[name]
    matrix = nn.Parameter(torch.ones(MATRIX))
    optimizer = kind([{"params": [matrix], **PROJECTED}])
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=kind.__name__ if "8bit" not in name else "min_8bit_size|complex"):
        optimizer.add_param_group(refused())
    assert [dict(group) for group in optimizer.param_groups] == groups
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(MATRIX))], **PROJECTED})
    for group in optimizer.param_groups:
        group["params"][0].grad = torch.ones(MATRIX)
    optimizer.step()
    assert not torch.equal(matrix, torch.ones(MATRIX))


@pytest.mark.parametrize("kind", [AdaLomo, AdamW8bit, Lomo])
def test_a_state_of_relative_steps_is_refused_where_there_are_none(kind):
    model = nn.Linear(4, 3)
    saving, loading = Adafactor(model.parameters()), kind(model.parameters(), lr=0.1)
    if kind is not Lomo:  # which takes no state in any case
        model(torch.ones(2, 4)).sum().backward()
        saving.step()
        saving.zero_grad()
    with pytest.raises(ValueError, match="has the learning rate None, which stands for Adafactor's relative steps"):
        loading.load_state_dict(saving.state_dict())
    assert loading.param_groups[0]["lr"] == 0.1
    again = Adafactor(model.parameters(), lr=0.1, relative_step=False)
    again.load_state_dict(saving.state_dict())
    assert again.param_groups[0]["lr"] is None
    assert again.param_groups[0]["relative_step"]
