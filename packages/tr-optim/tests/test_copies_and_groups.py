"""A copy has nothing of an unfinished step, and a group that is refused is not there."""

import copy

import fused_models
import pytest
import torch
from torch import nn

from tr_optim import Adafactor, AdaLomo, AdamW8bit, APOLLOAdamW, FiraAdamW, GaLoreAdamW, GaLoreAdamW8bit, Lomo


def train(model, optimizer, steps):
    dtype = model.head.weight.dtype
    for step in steps:
        optimizer.backward(model(model.batch(step).to(dtype)).square().mean())
        optimizer.step()


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
