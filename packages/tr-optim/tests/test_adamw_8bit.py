import copy
import math
from types import SimpleNamespace

import pytest
import torch
from reads import Reads
from torch import nn

from tr_optim import AdamW8bit
from tr_optim.moments.adam import quantized
from tr_optim.moments.blockwise_int8 import SIGNED, UNSIGNED, dequantize


def net(width=64):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def batches(steps, width=64):
    generator = torch.Generator().manual_seed(1)
    mixing = torch.randn(width, width, generator=generator) / width**0.5
    for _ in range(steps):
        x = torch.randn(32, width, generator=generator)
        yield x, torch.tanh(x @ mixing)


def train(optimizer, model, steps=30, first=0):
    losses = []
    for step, (x, y) in enumerate(batches(steps, model[0].in_features)):
        if step < first:
            continue
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def gradients(steps, kind):
    """Gradients of 16 blocks whose elements are up to four powers of ten apart, some of them seldom anything but 0."""
    generator = torch.Generator().manual_seed(2)
    sizes = 10 ** -((4.0 if kind == "wide" else 2.0) * torch.rand(16, 256, generator=generator))
    for _ in range(steps):
        gradient = sizes * torch.randn(16, 256, generator=generator)
        if kind == "sparse":
            gradient *= torch.rand(16, 256, generator=generator) < 0.1
        yield gradient


def updates(make, kind, steps=60):
    """The updates that an optimizer makes of given gradients, in units of the learning rate."""
    parameter = nn.Parameter(torch.zeros(16, 256, dtype=torch.float64))
    optimizer = make(parameter)
    for gradient in gradients(steps, kind):
        before = parameter.detach().clone()
        parameter.grad = gradient.double()
        optimizer.step()
        yield before - parameter.detach()


class UnderflowingAdamW(torch.optim.Optimizer):
    """AdamW whose moments are rounded to the nearest of 255 numbers that reach down to 5e-7 of a block's greatest."""

    def __init__(self, params):
        super().__init__(params, {})
        decades = [torch.linspace(0.1, 1, 2**n + 1).unfold(0, 2, 1).mean(1) * 10.0 ** (n - 6) for n in range(7)]
        self.positive = torch.cat([torch.zeros(1), *decades, torch.ones(1)]).double()

    def step(self, closure=None):
        parameter = self.param_groups[0]["params"][0]
        state = self.state[parameter]
        if not state:
            state.update(step=0, m=torch.zeros_like(parameter.data), v=torch.zeros_like(parameter.data))
        state["step"] += 1
        m = 0.9 * state["m"] + 0.1 * parameter.grad
        v = 0.999 * state["v"] + 0.001 * parameter.grad**2
        corrected = (v / (1 - 0.999 ** state["step"])).sqrt() + 1e-8
        parameter.data -= m / (1 - 0.9 ** state["step"]) / corrected
        state["m"], state["v"] = self.round(m), self.round(v)

    def round(self, values):
        greatest = values.abs().amax(dim=1, keepdim=True)
        between = (self.positive[1:] + self.positive[:-1]) / 2
        return self.positive[torch.bucketize(values.abs() / greatest, between)] * greatest * values.sign()


OPTIONS = {"lr": 1.0, "weight_decay": 0.0}


@pytest.mark.parametrize(("kind", "bound"), [("usual", 0.08), ("wide", 0.2), ("sparse", 0.1)])
def test_each_update_is_close_to_that_of_float32_moments_and_none_is_great(kind, bound):
    exact = updates(lambda p: torch.optim.AdamW([p], **OPTIONS), kind)
    ours = updates(lambda p: AdamW8bit([p], **OPTIONS), kind)
    underflowing = updates(lambda p: UnderflowingAdamW([p]), kind)
    greatest = 0.0
    for expected, found, other in zip(exact, ours, underflowing, strict=True):
        assert (found - expected).norm() < bound * expected.norm()
        assert found.abs().max() < 1.5 * expected.abs().max()
        greatest = max(greatest, (other.abs().max() / expected.abs().max()).item())
    if kind != "usual":
        assert greatest > 100, "the gradients must be such that a V that becomes 0 makes great steps"


def test_the_second_moment_follows_gradients_that_change_slowly():
    """It changes by 1/1000 a step, which is less than half the distance of two levels."""
    parameter = nn.Parameter(torch.zeros(16, 256))
    optimizer = AdamW8bit([parameter], lr=0.0)
    generator = torch.Generator().manual_seed(3)
    exact = torch.zeros(16, 256)
    fading = torch.where(torch.arange(256) % 2 == 0, 0.1, 1.0)
    nearest = None
    for step in range(1600):
        parameter.grad = torch.randn(16, 256, generator=generator) * (fading if step >= 400 else 1.0)
        optimizer.step()
        exact.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
        if step >= 400:
            nearest = quantized({"exp_avg": exact, "exp_avg_sq": exact}) if nearest is None else nearest
            held = dequantize(nearest["exp_avg_sq"], nearest["exp_avg_sq_scale"], UNSIGNED)
            held.mul_(0.999).addcmul_(parameter.grad, parameter.grad, value=0.001)
            nearest = quantized({"exp_avg": held, "exp_avg_sq": held})
    state = optimizer.state[parameter]
    found = dequantize(state["exp_avg_sq"], state["exp_avg_sq_scale"], UNSIGNED)
    held = dequantize(nearest["exp_avg_sq"], nearest["exp_avg_sq_scale"], UNSIGNED)
    ratio, of_nearest = found / exact, held / exact
    assert ratio.mean().item() == pytest.approx(1.0, abs=0.03)
    assert ratio.quantile(0.01) > 0.5
    assert ratio.quantile(0.99) < 1.6
    assert of_nearest.std() > 2 * ratio.std(), "rounding to the nearest must do worse"


def test_losses_are_those_of_adamw():
    theirs, ours = net(), net()
    options = {"lr": 1e-2, "weight_decay": 0.1}
    expected = train(torch.optim.AdamW(theirs.parameters(), **options), theirs, 200)
    found = train(AdamW8bit(ours.parameters(), **options), ours, 200)
    assert expected[-1] < 0.5 * expected[0]
    assert found == pytest.approx(expected, rel=0.05)
    assert sum(found[-50:]) == pytest.approx(sum(expected[-50:]), rel=0.01)


def test_smaller_tensors_have_the_moments_and_updates_of_adamw():
    theirs, ours = net(), net()
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    train(torch.optim.AdamW(theirs.parameters(), **options, foreach=False), theirs)
    optimizer = AdamW8bit(ours.parameters(), **options, min_8bit_size=10**6)
    train(optimizer, ours)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0, atol=1e-6)
    dtypes = {value.dtype for state in optimizer.state.values() for name, value in state.items() if name != "step"}
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("shape", [(4095,), (4096,), (4097,), (64, 63), (64, 64), (1, 4096), (63, 65)])
def test_on_both_sides_of_the_least_size_parameters_train_also_from_zeros(shape):
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(shape, generator=generator)
    trained = []
    for make in (torch.optim.AdamW, AdamW8bit):
        parameter = nn.Parameter(torch.zeros(shape))
        optimizer = make([parameter], lr=0.05, weight_decay=0.0)
        for _ in range(60):
            parameter.grad = parameter.detach() - target
            optimizer.step()
        trained.append(parameter.detach())
    state = optimizer.state[parameter]
    assert (state["exp_avg"].dtype == torch.int8) == (math.prod(shape) >= 4096)
    assert (trained[0] - target).norm() < 0.2 * target.norm()
    # Where a moment is below the step of its code, the two are up to two updates of `lr` apart.
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=2 * 0.05)
    assert (trained[1] - trained[0]).norm() < 0.02 * target.norm()


def test_the_state_is_tensors_of_the_size_that_is_documented():
    parameter = nn.Parameter(torch.randn(3, 70, 41))
    optimizer = AdamW8bit([parameter])
    parameter.grad = torch.randn(3, 70, 41)
    optimizer.step()
    state = optimizer.state[parameter]
    blocks = -(-70 * 41 // 256)
    assert {name: (tuple(value.shape), value.dtype) for name, value in state.items()} == {
        "step": ((), torch.float64),
        "exp_avg": ((3, 70, 41), torch.int8),
        "exp_avg_sq": ((3, 70, 41), torch.uint8),
        "exp_avg_scale": ((3, blocks), torch.float32),
        "exp_avg_sq_scale": ((3, blocks), torch.float32),
    }
    size = sum(value.numel() * value.element_size() for name, value in state.items() if name != "step")
    assert size == 2 * parameter.numel() + 8 * 3 * blocks
    assert size / parameter.numel() == pytest.approx(2.03, abs=0.005)


class Watch(Reads):
    """Notes the largest tensor that is made too."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = {t.data_ptr() for t in args if isinstance(t, torch.Tensor)}
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if isinstance(result, torch.Tensor) and result.data_ptr() not in inputs:
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_reads_nothing_back_and_its_work_space_does_not_grow_with_the_tensor(dtype, monkeypatch):
    monkeypatch.setattr("tr_optim.engine.precision._ON_CPU", 4096)
    parameter = nn.Parameter(torch.randn(100, 1000, dtype=dtype))
    optimizer = AdamW8bit([parameter], lr=1e-2)
    for _ in range(3):
        parameter.grad = torch.randn(100, 1000, dtype=dtype)
        with Watch() as watch:
            optimizer.step()
        assert watch.count == 0
    assert 0 < watch.largest <= 4096
    with Watch() as watch:
        assert torch.ones(5000).sum().item() == 5000
    assert (watch.count, watch.largest) == (1, 5000), "it must see reads and tensors"


def test_pieces_are_updated_as_the_whole_is(monkeypatch):
    whole, in_pieces = net(), net()
    train(AdamW8bit(whole.parameters(), lr=1e-2), whole)
    monkeypatch.setattr("tr_optim.engine.precision._ON_CPU", 2048)
    train(AdamW8bit(in_pieces.parameters(), lr=1e-2), in_pieces)
    assert torch.equal(weights(in_pieces), weights(whole))


def test_a_state_of_torchs_adamw_is_rounded_to_the_nearest_codes():
    model = net()
    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(theirs, model, 5)
    ours = AdamW8bit(model.parameters(), lr=1e-3)
    saved_whole = copy.deepcopy(theirs.state_dict())
    ours.load_state_dict(saved_whole)
    saved, taken = theirs.state[model[0].weight], ours.state[model[0].weight]
    assert (int(taken["step"]), taken["step"].dtype) == (5, torch.float64)
    assert ours.param_groups[0]["lr"] == 1e-2
    for name, code, bound in (("exp_avg", SIGNED, 0.03), ("exp_avg_sq", UNSIGNED, 0.03)):
        found = dequantize(taken[name], taken[f"{name}_scale"], code)
        assert 0 < (found - saved[name]).norm() < bound * saved[name].norm()
    assert ours.state[model[0].bias]["exp_avg"].dtype == torch.float32
    other = copy.deepcopy(model)
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    theirs.load_state_dict(saved_whole)
    expected, found = train(theirs, other, 9, first=5), train(ours, model, 9, first=5)
    assert found == pytest.approx(expected, rel=0.01)


def test_groups_may_keep_float32_moments():
    model = net()
    made = [
        {"params": [model[0].weight], "min_8bit_size": 10**9},
        {"params": [model[0].bias, *model[2].parameters()]},
    ]
    optimizer = AdamW8bit(made, lr=1e-2, min_8bit_size=100)
    train(optimizer, model, 2)
    kept = {name: optimizer.state[p]["exp_avg"].dtype for name, p in model.named_parameters()}
    assert kept == {
        "0.weight": torch.float32,
        "0.bias": torch.int8,
        "2.weight": torch.int8,
        "2.bias": torch.float32,
    }
    other = AdamW8bit(made, lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[model[0].weight]["exp_avg"].dtype == torch.float32
    assert other.state[model[0].bias]["exp_avg"].dtype == torch.int8


def test_layouts_in_memory_do_not_matter():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(80, 64, generator=generator)
    usual, transposed = nn.Parameter(start.clone()), nn.Parameter(start.t().contiguous().t())
    assert not transposed.is_contiguous()
    first, second = AdamW8bit([usual], lr=1e-2), AdamW8bit([transposed], lr=1e-2)
    for _ in range(5):
        gradient = torch.randn(80, 64, generator=generator)
        usual.grad, transposed.grad = gradient.clone(), gradient.t().contiguous().t()
        first.step()
        second.step()
    assert torch.equal(usual.detach(), transposed.detach())


def test_training_arguments_give_rate_betas_and_eps():
    args = SimpleNamespace(
        learning_rate=3e-4, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, optim_args="min_8bit_size=100"
    )
    made = [{"params": [nn.Parameter(torch.zeros(3))], "weight_decay": 0.0}]
    group = AdamW8bit.from_arguments(made, args).param_groups[0]
    expected = {"lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.0, "min_8bit_size": 100}
    assert {name: group[name] for name in expected} == expected
    args.optim_args = "min_size=100"
    with pytest.raises(ValueError, match="adamw_8bit does not take 'min_size'.* did you mean min_8bit_size"):
        AdamW8bit.from_arguments(made, args)


def test_states_that_do_not_fit_are_refused():
    model = net()
    optimizer = AdamW8bit(model.parameters(), lr=1e-2)
    train(optimizer, model, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"].float()
    with pytest.raises(
        ValueError, match=r"exp_avg is torch.float32 with scales of shape \(128, 1\), and torch.int8 with"
    ):
        AdamW8bit(net().parameters()).load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["exp_avg_sq_scale"]
    with pytest.raises(
        ValueError, match=r"exp_avg_sq is torch.uint8 with scales of shape None, and torch.uint8 with \(128, 1\)"
    ):
        AdamW8bit(net().parameters()).load_state_dict(saved)
    with pytest.raises(ValueError, match=r"shape \(256, 128\) has the shape \(128, 64\)"):
        AdamW8bit(net(128).parameters()).load_state_dict(optimizer.state_dict())
