"""Loading what another optimizer saved: it goes on, or it is refused in words and changes nothing."""

import pytest
import torch
from torch import nn

from tr_optim import (
    Adafactor,
    AdaLomo,
    AdamW8bit,
    APOLLOAdamW,
    FiraAdamW,
    GaLoreAdafactor,
    GaLoreAdamW,
    GaLoreAdamW8bit,
    Lomo,
)

ADAFACTOR = {"lr": 1e-2, "relative_step": False}
SAVING = {kind.__name__: kind for kind in (AdamW8bit, APOLLOAdamW, FiraAdamW, GaLoreAdamW, GaLoreAdamW8bit)}
SAVING |= {
    "Adafactor": lambda groups: Adafactor(groups, **ADAFACTOR),
    "Adafactor with beta1": lambda groups: Adafactor(groups, beta1=0.9, **ADAFACTOR),
    "GaLoreAdafactor": lambda groups: GaLoreAdafactor(groups, **ADAFACTOR),
    "AdaLomo": AdaLomo,
    "Lomo": Lomo,
    "AdamW": torch.optim.AdamW,
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}
LOADING = [name for name in SAVING if name not in ("AdamW", "SGD")]
GO_ON = {
    ("GaLoreAdamW", "GaLoreAdamW8bit"),
    ("GaLoreAdamW8bit", "GaLoreAdamW"),  # so small projections have float32 moments
    ("FiraAdamW", "GaLoreAdamW"),
    ("FiraAdamW", "GaLoreAdamW8bit"),
    ("AdamW", "AdamW8bit"),
    ("Adafactor", "AdaLomo"),
    ("AdaLomo", "Adafactor"),
    ("Adafactor", "Adafactor with beta1"),
    ("Adafactor with beta1", "Adafactor"),
}


def build(kind):
    torch.manual_seed(0)
    model = nn.Linear(96, 64)
    return model, SAVING[kind]([{"params": [model.weight], "rank": 4}, {"params": [model.bias]}])


def trained(kind):
    model, optimizer = build(kind)
    for _ in range(2):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    loss = model(torch.ones(2, 96)).square().mean()
    if getattr(optimizer, "updates_in_backward", False):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(optimizer):
    return [(name, value.clone()) for state in optimizer.state.values() for name, value in state.items()]


@pytest.mark.parametrize("loading", LOADING)
@pytest.mark.parametrize("saving", SAVING)
def test_a_state_of_another_optimizer_goes_on_or_is_refused_and_changes_nothing(saving, loading):
    _, saved = trained(saving)
    model, optimizer = trained(loading)
    groups, states = repr(optimizer.param_groups), tensors(optimizer)
    if saving in (loading, "Lomo") or (saving, loading) in GO_ON:  # Lomo saves no state
        optimizer.load_state_dict(saved.state_dict())
    else:
        with pytest.raises(ValueError, match=r"parameter of shape \(64, 96\) has"):
            optimizer.load_state_dict(saved.state_dict())
        assert repr(optimizer.param_groups) == groups
        for (name, old), (same_name, new) in zip(states, tensors(optimizer), strict=True):
            assert (name, old.tolist()) == (same_name, new.tolist())
    step(model, optimizer)
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_what_another_optimizers_state_lacks_is_named():
    _, saved = trained("GaLoreAdafactor")
    _, optimizer = build("GaLoreAdamW")
    words = "has basis_left, exp_avg_sq_col, exp_avg_sq_row, step, and GaLoreAdamW needs exp_avg, exp_avg_sq too"
    with pytest.raises(ValueError, match=words):
        optimizer.load_state_dict(saved.state_dict())
    _, saved = trained("SGD")
    _, optimizer = build("AdamW8bit")
    with pytest.raises(ValueError, match="has momentum_buffer, and AdamW8bit needs step, exp_avg, exp_avg_sq too"):
        optimizer.load_state_dict(saved.state_dict())


@pytest.mark.parametrize("kind", [AdamW8bit, GaLoreAdamW8bit])
def test_the_least_size_of_a_group_outlives_a_state_without_one(kind):
    model = nn.Linear(96, 64)
    source = torch.optim.AdamW if kind is AdamW8bit else GaLoreAdamW
    saved = source(model.parameters())
    model(torch.ones(2, 96)).square().mean().backward()
    saved.step()
    optimizer = kind([{"params": model.parameters(), "min_8bit_size": 10_000}])
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.param_groups[0]["min_8bit_size"] == 10_000
    assert optimizer.state[model.weight]["exp_avg"].dtype == torch.float32


def test_torchs_adamw_goes_on_as_galore_without_a_projection():
    model = nn.Linear(96, 64)
    saved = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 96)).square().mean().backward()
    saved.step()
    optimizer = GaLoreAdamW(model.parameters())
    optimizer.load_state_dict(saved.state_dict())
    before = [parameter.detach().clone() for parameter in model.parameters()]
    saved.step()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), before, strict=True):
            parameter.copy_(old)
    optimizer.step()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), wanted, rtol=0, atol=1e-6)


def test_lomo_takes_no_state_that_it_would_only_keep():
    _, saved = trained("AdamW")
    _, optimizer = build("Lomo")
    with pytest.raises(ValueError, match="has exp_avg, exp_avg_sq, step, which Lomo would keep in memory and not use"):
        optimizer.load_state_dict(saved.state_dict())
    assert not optimizer.state


def test_adalomo_takes_no_first_moment():
    _, saved = trained("Adafactor with beta1")
    _, optimizer = build("AdaLomo")
    with pytest.raises(ValueError, match="has exp_avg, a first moment, and AdaLomo keeps none"):
        optimizer.load_state_dict(saved.state_dict())
