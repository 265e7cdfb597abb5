import copy
from functools import partial

import pytest
import torch
from galore_runs import data, groups, net, train, weights
from torch import nn

from tr_optim import GaLoreAdamW, GaLoreAdamW8bit, LossScaler
from tr_optim.moments.blockwise_int8 import SIGNED, UNSIGNED, dequantize

# So that the small states of these tests are codes.
All8bit = partial(GaLoreAdamW8bit, min_8bit_size=0)


def moved(result):
    return (result - weights(net())).norm().item()


def test_losses_stay_close_over_many_bases():
    generator = torch.Generator().manual_seed(5)
    mixing = torch.randn(48, 80, generator=generator) / 7
    curves = []
    for kind in (GaLoreAdamW, All8bit):
        model, losses = net(), []
        optimizer = kind(groups(model, rank=16, update_proj_gap=10), 3e-3, mode="deferred", weight_decay=0.01)
        draw = torch.Generator().manual_seed(6)
        for _ in range(150):
            x = torch.randn(32, 48, generator=draw)
            loss = (model(x) - torch.tanh(x @ mixing)).square().mean()
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(torch.tensor(losses))
    exact, ours = curves
    assert exact[-20:].mean() < 0.6 * exact[0]
    assert ((ours - exact).abs() < 0.03 * exact).all()
    assert ours[-50:].mean().item() == pytest.approx(exact[-50:].mean().item(), rel=0.01)


def test_the_state_is_tensors_of_the_size_that_is_documented():
    parameter = nn.Parameter(torch.randn(40, 1280))
    optimizer = GaLoreAdamW8bit([parameter], rank=8)
    parameter.grad = torch.randn(40, 1280)
    optimizer.step()
    state = optimizer.state[parameter]
    blocks = -(-1280 // 256)
    assert {name: (tuple(value.shape), value.dtype) for name, value in state.items()} == {
        "basis_left": ((40, 8), torch.float32),
        "exp_avg": ((8, 1280), torch.int8),
        "exp_avg_sq": ((8, 1280), torch.uint8),
        "exp_avg_scale": ((8, blocks), torch.float32),
        "exp_avg_sq_scale": ((8, blocks), torch.float32),
        "step": ((), torch.float64),
    }
    size = sum(value.numel() * value.element_size() for name, value in state.items() if "exp" in name)
    assert size / (8 * 1280) == pytest.approx(2.03, abs=0.005)


@pytest.mark.parametrize("width", [255, 256, 257])
def test_on_both_sides_of_the_least_size_projections_train(width):
    start = torch.randn(32, width, generator=torch.Generator().manual_seed(0))
    results = []
    for kind in (GaLoreAdamW, GaLoreAdamW8bit):
        parameter = nn.Parameter(start.clone())
        optimizer = kind([parameter], 0.05, rank=16, scale=1.0, update_proj_gap=20)
        for _ in range(60):
            parameter.grad = parameter.detach().clone()
            optimizer.step()
        results.append(parameter.detach())
    assert (optimizer.state[parameter]["exp_avg"].dtype == torch.int8) == (width >= 256)
    assert results[0].norm() < 0.8 * start.norm()
    assert (results[1] - results[0]).norm() < 0.03 * start.norm()
    assert torch.equal(*results) == (width < 256)


def test_a_new_basis_carries_over_what_the_codes_stand_for():
    states = []
    for kind in (GaLoreAdamW, All8bit):
        model = net()
        optimizer = kind(groups(model, update_proj_gap=3), 0.0, stagger=False)
        train(optimizer, model, last=4)  # the fourth has the second basis
        states.append(optimizer.state[model[0].weight])
    exact, ours = states
    assert torch.equal(exact["basis_right"], ours["basis_right"])
    for name, code in (("exp_avg", SIGNED), ("exp_avg_sq", UNSIGNED)):
        found = dequantize(ours[name], ours[f"{name}_scale"], code)
        assert 0 < (found - exact[name]).norm() < 0.05 * exact[name].norm()
        assert (exact[name] - dequantize(ours[name], ours[f"{name}_scale"], code)).abs().max() > 0


def test_a_step_that_overflows_under_loss_scaling_leaves_everything_untouched():
    model, inputs = net(), data()[0]
    optimizer = All8bit(groups(model, update_proj_gap=2), 1e-2, mode="deferred", weight_decay=0.1)
    scaler = LossScaler("cpu", init_scale=1024.0, growth_interval=100)
    for step in range(6):
        before, states = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
        x = inputs[step].clone()
        x[0, 0] = float("inf") if step in (2, 3) else x[0, 0]
        scaler.backward(optimizer, model(x).square().mean())
        optimizer.clip_grad_norm(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, weights(model)) == (step in (2, 3))
        if step in (2, 3):
            after = optimizer.state_dict()["state"]
            assert all(torch.equal(after[n][name], v) for n, state in states.items() for name, v in state.items())
    assert scaler.get_scale() == 256.0


def test_a_state_with_float32_moments_is_rounded_and_the_other_way_is_refused():
    model = net()
    exact = GaLoreAdamW(groups(model), 1e-2)
    train(exact, model, last=5)
    saved = copy.deepcopy([model.state_dict(), exact.state_dict()])
    results = []
    for kind in (GaLoreAdamW, All8bit):
        other = net()
        other.load_state_dict(saved[0])
        optimizer = kind(groups(other), 1e-2)
        optimizer.load_state_dict(saved[1])
        results.append(train(optimizer, other, first=5))
    assert optimizer.param_groups[0]["min_8bit_size"] == 0
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.int8}
    torch.testing.assert_close(exact.state_dict()["state"][0]["exp_avg"], saved[1]["state"][0]["exp_avg"])
    assert 0 < (results[0] - results[1]).norm() < 0.03 * (results[0] - weights(model)).norm()
    with pytest.raises(ValueError, match=r"shape \(96, 48\) has moments in 8 bits; load it into the class that saved"):
        GaLoreAdamW(groups(net()), 1e-2).load_state_dict(optimizer.state_dict())


def test_a_state_of_its_own_is_taken_over_as_it_is_whatever_the_least_size():
    model = net()
    optimizer = All8bit(groups(model), 1e-2)
    train(optimizer, model, last=2)
    other = GaLoreAdamW8bit(groups(model), 1e-2)
    other.load_state_dict(optimizer.state_dict())
    assert {state["exp_avg"].dtype for state in other.state.values()} == {torch.int8}


def test_groups_may_have_a_least_size_of_their_own():
    model = net()
    made = groups(model)
    made[0]["min_8bit_size"] = 0
    optimizer = GaLoreAdamW8bit(made, 1e-2)
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(4, 4))]})
    assert [group["min_8bit_size"] for group in optimizer.param_groups] == [0, 4096, 4096]
    train(optimizer, model, last=1)
    assert optimizer.state[model[0].weight]["exp_avg"].dtype == torch.int8
    assert optimizer.state[model[0].bias]["exp_avg"].dtype == torch.float32
