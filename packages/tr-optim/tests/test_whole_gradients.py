"""What APOLLO and Fira have in common: updates made of the gradient itself, limited in their growth."""

import copy
from itertools import pairwise

import pytest
import torch
from galore_runs import ALIKE, data, distance, groups, net, run, train, weights
from torch import nn

from tr_optim import APOLLOAdamW, FiraAdamW

KINDS = [APOLLOAdamW, FiraAdamW]
CHOICES = {
    # Of another seed than 0, by which one row's projection is so small that its rounding counts 50 times.
    "apollo": (APOLLOAdamW, {}, {"seed": 1}),
    "apollo, by matrix": (APOLLOAdamW, {"scale_type": "tensor", "rank": 1, "scale": 128.0}, {}),
    "apollo, by svd": (APOLLOAdamW, {"proj": "svd"}, {}),
    "apollo, decayed": (APOLLOAdamW, {"proj_type": "reverse_std"}, {"weight_decay": 0.1}),
    "fira": (FiraAdamW, {}, {}),
    "fira, other side": (FiraAdamW, {"proj_type": "reverse_std"}, {}),
    "fira, decayed": (FiraAdamW, {"norm_growth": None}, {"weight_decay": 0.1}),
}


def run_one(choice, mode="step", **how):
    kind, projection, options = CHOICES[choice]
    return run(mode, kind=kind, projection=projection, **options, **how)


@pytest.mark.parametrize("choice", ["apollo", "fira"])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_clipping_in_the_backward_pass_is_that_of_clip_grad_norm(choice, micro_batches):
    usual_norms, norms = [], []
    usual = run_one(choice, max_norm=0.01, norms=usual_norms)
    kind, projection, options = CHOICES[choice]
    model = net()
    optimizer = kind(groups(model, **projection), 1e-2, mode="immediate", **options)
    optimizer.clip_to(0.01)
    clipped = train(optimizer, model, micro_batches=micro_batches, max_norm=0.01, norms=norms)
    assert not optimizer.norm_is_estimated
    assert distance(usual, clipped) < ALIKE
    assert norms == pytest.approx(usual_norms, rel=1e-5)
    assert min(norms) > 0.01
    moments = [s["exp_avg"].norm().item() for s in optimizer.state.values()]
    assert sum(m * m for m in moments) ** 0.5 < 0.02  # they are those of clipped gradients


def test_a_measuring_pass_leaves_other_gradients_alone_and_is_made_for_clipping_only():
    outside = nn.Parameter(torch.ones(()))
    model = net()
    optimizer = APOLLOAdamW(groups(model), 1e-2, mode="immediate")
    optimizer.backward(model(data()[0][0]).square().mean())  # the first looks at the graph
    passes, others = [], []
    model[0].weight.register_hook(passes.append)
    outside.register_post_accumulate_grad_hook(others.append)
    for max_norm, expected in ((None, 1), (0.5, 2), (None, 1)):
        optimizer.step()
        optimizer.zero_grad()
        optimizer.clip_to(max_norm)
        optimizer.backward((model(data()[0][0]) * outside).square().mean())
        assert (len(passes), len(others)) == (expected, 1)
        passes.clear()
        others.clear()


def test_a_parameter_of_earlier_micro_batches_alone_counts_in_the_norm_and_is_clipped():
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)])
    x = torch.randn(4, 8)
    reference = copy.deepcopy(layers)
    layered = FiraAdamW(groups(layers, rank=2), 1e-2, mode="immediate")
    layered.clip_to(0.01)
    ordinary = FiraAdamW(groups(reference, rank=2), 1e-2)
    for _ in range(3):
        layered.backward(layers[1](layers[0](x)).square().mean(), last=False)
        layered.backward(layers[0](x).square().mean(), last=True)
        norm = layered.clip_grad_norm(0.01)
        (reference[1](reference[0](x)).square().mean() + reference[0](x).square().mean()).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        torch.testing.assert_close(norm, expected)
        for optimizer in (layered, ordinary):
            optimizer.step()
            optimizer.zero_grad()
    assert distance(weights(layers), weights(reference)) < ALIKE


@pytest.mark.parametrize("kind", KINDS)
def test_a_scaled_gradient_grows_by_no_more_than_is_allowed(kind):
    parameter = nn.Parameter(torch.zeros(12, 20))
    optimizer = kind([parameter], lr=1.0, rank=4, norm_growth=1.05)
    norms = []
    for step in range(8):
        generator = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(12, 20, generator=generator) * (10.0**step)
        optimizer.step()
        norms.append(optimizer.state[parameter]["scaled_norm"].item())
    ratios = [after / before for before, after in pairwise(norms)]
    assert max(ratios) == pytest.approx(1.05)
    assert max(ratios) <= 1.05 * (1 + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_learning_rate_is_no_part_of_what_is_limited(kind):
    """So that a warmup, in which it grows by more than 1 % a step, is not held back."""
    found = []
    for rates in ((1.0,) * 6, (0.0, 1e-3, 1e-2, 1e-1, 1.0, 10.0)):
        parameter = nn.Parameter(torch.zeros(12, 20))
        optimizer = kind([parameter], lr=1.0, rank=4)
        norms = []
        for step, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            parameter.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(step))
            optimizer.step()
            norms.append(optimizer.state[parameter]["scaled_norm"].item())
        found.append(norms)
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_without_a_gradient_does_not_hold_back_those_that_follow(kind):
    def trained(gradients):
        parameter = nn.Parameter(torch.zeros(12, 20))
        optimizer = kind([parameter], lr=1.0, rank=4, betas=(0.0, 0.0))
        for gradient in gradients:
            before = parameter.detach().clone()
            parameter.grad = gradient.clone()
            optimizer.step()
        return (parameter.detach() - before).norm()

    generator = torch.Generator().manual_seed(0)
    some = [torch.randn(12, 20, generator=generator) for _ in range(2)]
    zeros = torch.zeros(12, 20)
    for gradients in ([zeros, some[0]], [some[0], zeros, some[1]], [some[0], zeros, zeros, some[1]]):
        assert trained(gradients) > 0.5 * trained([some[0], some[1]])


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_of_zeros_moves_nothing_but_by_momentum(kind):
    parameter = nn.Parameter(torch.ones(12, 20))
    optimizer = kind([parameter], rank=4)
    parameter.grad = torch.zeros(12, 20)
    optimizer.step()
    assert torch.equal(parameter.detach(), torch.ones(12, 20))
    assert optimizer.state[parameter]["scaled_norm"] == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_gradient_that_is_not_finite_is_seen_in_the_weights_and_not_in_what_limits_the_next(kind, bad):
    parameter = nn.Parameter(torch.zeros(12, 20))
    optimizer = kind([parameter], rank=4)
    for step in range(3):
        parameter.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(step))
        if step == 1:
            before = optimizer.state[parameter]["scaled_norm"].clone()
            parameter.grad[3, 5] = bad
        optimizer.step()
        if step == 1:
            assert torch.equal(optimizer.state[parameter]["scaled_norm"], before)
            assert not parameter.isfinite().all()
    assert optimizer.state[parameter]["scaled_norm"].isfinite()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_so_large_that_their_norm_overflows_are_limited(kind):
    parameter = nn.Parameter(torch.zeros(12, 20))
    optimizer = kind([parameter], rank=4, lr=1.0)
    parameter.grad = torch.randn(12, 20, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    before = optimizer.state[parameter]["scaled_norm"].clone()
    parameter.grad = torch.full((12, 20), 1e38)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["scaled_norm"], before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_leaves_gradients_as_they_are(kind):
    model = net()
    optimizer = kind(groups(model), 1e-2)
    (model(data()[0][0]) - data()[1][0]).square().mean().backward()
    before = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_what_follows_from_noise_in_the_data_is_as_small_as_the_noise(kind):
    assert distance(run(kind=kind), run(kind=kind, noise=1e-7)) < ALIKE


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_applied_and_freed_in_the_backward_pass(kind):
    model = net()
    before = weights(model)
    optimizer = kind(groups(model), 1e-2, mode="immediate")
    optimizer.backward(model(data()[0][0]).square().mean())
    assert all(p.grad is None for p in model.parameters())
    assert not torch.equal(before, weights(model))
    window = optimizer._gathering.window
    assert not window.whole
    assert not window.projected


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_that_was_not_announced_is_refused_in_the_backward_pass(kind):
    model = net()
    optimizer = kind(groups(model), 1e-2, mode="immediate")
    optimizer.backward(model(data()[0][0]).square().mean())
    with pytest.raises(ValueError, match=r"max_norm=1 cannot be held .* call clip_to\(1\) before the step's backward"):
        optimizer.clip_grad_norm(1.0)
    assert optimizer.clip_grad_norm(None) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_scaled_loss_is_refused_in_the_backward_pass(kind):
    model = net()
    optimizer = kind(groups(model), 1e-2, mode="immediate")
    with pytest.raises(ValueError, match="an overflow would be in the weights .* use mode='step'"):
        optimizer.backward(model(data()[0][0]).sum(), scale=torch.tensor(8.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["step", "immediate"])
def test_small_updates_of_low_precision_weights_are_not_lost_where_they_are_rounded_stochastically(kind, mode):
    moved = []
    for rounds in (True, False):
        model = net(bias=False).bfloat16()
        optimizer = kind(groups(model), 1e-5, mode=mode, stochastic_rounding=rounds)
        before = weights(model).float()
        x, y = (part.bfloat16() for part in data())
        for step in range(4):
            optimizer.backward((model(x[step]) - y[step]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        moved.append((weights(model).float() != before).float().mean())
    assert moved[0] > 2 * moved[1]
