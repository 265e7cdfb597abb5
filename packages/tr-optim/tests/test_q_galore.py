import torch
from galore_runs import data, groups, net

from tr_optim import GaLoreAdamW8bit

STEPS = 30
# What Q-GaLore has beside int8 weights.
OPTIONS = {
    "min_8bit_size": 256,
    "basis_dtype": "int4",
    "refresh": "lazy",
    "refresh_cosine": 0.05,
    "refresh_window": 2,
    "stochastic_rounding": True,
    "seed": 4,
}


def build(mode="step"):
    model = net().to(torch.bfloat16)
    return model, GaLoreAdamW8bit(groups(model, update_proj_gap=3), 1e-2, mode=mode, **OPTIONS)


def train(model, optimizer, first=0, last=STEPS):
    inputs, targets = (part.to(torch.bfloat16) for part in data())
    losses = []
    for step in range(first, last):
        loss = (model(inputs[step % 12]) - targets[step % 12]).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return torch.cat([p.detach().flatten() for p in model.parameters()]), losses


def test_its_parts_work_together_in_few_bytes():
    model, optimizer = build()
    _, losses = train(model, optimizer)
    assert sum(losses[-12:]) < 0.99 * sum(losses[:12])
    state = optimizer.state[model[0].weight]
    assert state["refreshed"][1] > 0
    assert {name: value.dtype for name, value in state.items() if value.numel() > 96} == {
        "basis_right": torch.uint8,
        "exp_avg": torch.int8,
        "exp_avg_sq": torch.uint8,
    }
