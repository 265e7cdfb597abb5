import copy
from functools import partial

import pytest
import torch
from galore_runs import data, distance, groups, net, run, train, weights
from torch import nn

from tr_optim import GaLoreAdamW, GaLoreAdamW8bit, LossScaler
from tr_optim.moments.blockwise_int8 import SIGNED, UNSIGNED, dequantize

# So that the small states of these tests are codes.
All8bit = partial(GaLoreAdamW8bit, min_8bit_size=0)


def moved(result):
    return (result - weights(net())).norm().item()


@pytest.mark.parametrize(
    "options",
    [{}, {"proj_type": "full"}, {"proj_type": "reverse_std"}, {"weight_decay": 0.1}, {"compat": "galore-torch"}],
)
def test_all_modes_give_the_same_bits_and_are_close_to_float32_moments(options):
    options = dict(options)
    projection = {"proj_type": options.pop("proj_type", "std")}
    modes = ("step", "deferred", "immediate")
    step, deferred, immediate = (run(m, kind=All8bit, projection=projection, **options) for m in modes)
    assert torch.equal(step, deferred)
    assert torch.equal(step, immediate)
    if options.get("compat") is None:  # whose singular vectors have any sign, so that rounding changes a run
        exact = run("step", projection=projection, **options)
        assert 0 < (step - exact).norm() < 0.03 * moved(exact)


@pytest.mark.parametrize("mode", ["step", "deferred", "immediate"])
def test_micro_batches_add_up_to_one_batch_but_for_single_codes(mode):
    one, four = run("step", kind=All8bit), run(mode, kind=All8bit, micro_batches=4)
    assert distance(one, four) < 1e-3
    assert (one - four).norm() < 1e-3 * moved(one)


def test_clipping_is_that_of_clip_grad_norm_but_for_single_codes():
    usual_norms, deferred_norms = [], []
    usual = run("step", kind=All8bit, max_norm=0.02, norms=usual_norms)
    deferred = run("deferred", kind=All8bit, max_norm=0.02, norms=deferred_norms)
    assert distance(usual, run("step", kind=All8bit)) > 1e-3  # it clipped
    assert (usual - deferred).norm() < 1e-3 * moved(usual)
    assert usual_norms == pytest.approx(deferred_norms, rel=1e-4)


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


def test_small_projections_and_biases_of_zeros_train_as_with_float32_moments():
    torch.manual_seed(0)
    linear = nn.Linear(64, 64)
    nn.init.zeros_(linear.bias)
    results = []
    for kind in (GaLoreAdamW, GaLoreAdamW8bit):
        model = copy.deepcopy(linear)
        made = [{"params": [model.weight], "rank": 16, "scale": 1.0}, {"params": [model.bias]}]
        optimizer = kind(made, 1e-2)
        generator = torch.Generator().manual_seed(1)
        for _ in range(20):
            x = torch.randn(16, 64, generator=generator)
            (model(x) - x.roll(1, dims=1) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (model.weight - linear.weight).abs().max() > 0.05
        assert (model.bias > 0.05).all()
        results.append(weights(model))
    assert torch.equal(*results)


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


def test_a_changed_rank_takes_effect_and_keeps_what_was_learnt():
    model = net()
    optimizer = All8bit(groups(model), 1e-2)
    train(optimizer, model, last=3)
    optimizer.param_groups[0]["rank"] = 12
    train(optimizer, model, first=3, last=4)
    state = optimizer.state[model[0].weight]
    assert (state["exp_avg"].shape, state["exp_avg"].dtype) == ((96, 12), torch.int8)
    assert state["exp_avg_scale"].shape == (96, 1)
    assert int(state["step"]) == 4


def test_stacks_of_matrices_are_updated_as_their_matrices_are():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 16, 256, generator=generator)
    stack = nn.Parameter(start.clone())
    single = [nn.Parameter(start[n].clone()) for n in range(3)]
    # Each row of the projections of 4 x 256 is a block, also of the stack.
    options = {"lr": 1e-2, "rank": 4, "update_proj_gap": 3, "scale": 1.0, "method": "svd", "stagger": False}
    together, alone = All8bit([stack], **options), All8bit(single, **options)
    for _ in range(7):
        stack.grad = torch.randn(3, 16, 256, generator=generator)
        for n in range(3):
            single[n].grad = stack.grad[n].clone()
        together.step()
        alone.step()
    assert (stack - start).abs().max() > 1e-2
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in single]), rtol=0, atol=1e-3)


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


def test_options_out_of_range_are_refused():
    parameter = nn.Parameter(torch.zeros(4, 6))
    with pytest.raises(ValueError, match="min_8bit_size=-1 must be a whole number from 0"):
        GaLoreAdamW8bit([parameter], min_8bit_size=-1)
    with pytest.raises(ValueError, match="GaLoreAdamW8bit: rank=0 must be a whole number from 1"):
        GaLoreAdamW8bit([parameter], rank=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'rnk'"):
        GaLoreAdamW8bit([parameter], rnk=2)
