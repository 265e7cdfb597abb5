import sys
import types

import pytest
import torch
from fused_models import (
    Shapes,
    Tied,
    assert_same_bits,
    build,
    greatest_difference,
    loss_of,
    train,
    train_plainly,
    weights_of,
)
from torch import nn

from tr_optim import AdaLomo, Lomo, parameter_groups


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_weights_are_those_of_gradient_descent_bit_for_bit(decay):
    ours, theirs = build(), build()
    norms = train(ours, Lomo(ours.parameters(), lr=0.1, weight_decay=decay), 8)
    expected = train_plainly(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 8, decay=0.1 * decay)
    assert_same_bits(weights_of(ours), weights_of(theirs))
    assert norms == pytest.approx(expected, rel=1e-6)
    assert greatest_difference(ours, build()) > 1e-2


def test_clipping_by_norm_is_that_of_torch_in_two_passes_of_the_same_step():
    ours, theirs = build(), build()
    optimizer = Lomo(ours.parameters(), lr=0.5, clip_grad_norm=0.6)
    norms = train(ours, optimizer, 8, max_norm=0.6)
    expected = train_plainly(theirs, torch.optim.SGD(theirs.parameters(), lr=0.5), 8, max_norm=0.6)
    assert max(expected) > 0.6 > min(expected), "both cases must come up, so that a stale coefficient shows"
    assert norms == pytest.approx(expected, rel=1e-6)
    assert greatest_difference(ours, theirs) <= 5e-7  # of weights near 1: the coefficient is rounded in another place
    assert optimizer.num_passes == 16


def test_clipping_by_value_is_that_of_torch_in_one_pass():
    ours, theirs = build(), build()
    optimizer = Lomo(ours.parameters(), lr=0.1, clip_grad_value=0.01)
    train(ours, optimizer, 5)
    train_plainly(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), 5, max_value=0.01)
    assert_same_bits(weights_of(ours), weights_of(theirs))
    assert optimizer.num_passes == 5


@pytest.mark.parametrize("clip", [None, 0.05])
def test_groups_have_their_own_learning_rate_and_decay(clip):
    def groups(model):
        return [
            {"params": [model.experts], "lr": 0.3, "weight_decay": 0.2},
            {"params": [model.head.weight, model.head.bias], "weight_decay": 0.0},
        ]

    ours, theirs = build(), build()
    train(ours, Lomo(groups(ours), lr=0.1, weight_decay=0.5, clip_grad_norm=clip), 5, max_norm=clip)
    # In gradient descent a decayed weight is one with an L2 gradient; clipping must not see that.
    plain = torch.optim.SGD(groups(theirs), lr=0.1, weight_decay=0.0)
    for group in plain.param_groups:
        group["weight_decay"] = 0.0
    shrink = 1 - 0.3 * 0.2
    for step in range(5):
        plain.zero_grad()
        loss_of(theirs, theirs.batch(step)).backward()
        nn.utils.clip_grad_norm_([theirs.experts, theirs.head.weight, theirs.head.bias], clip or torch.inf)
        with torch.no_grad():
            theirs.experts.mul_(shrink)
        plain.step()
    assert greatest_difference(ours, theirs) <= 1e-7
    assert torch.equal(ours.norm.weight, build().norm.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("clip", [None, 0.02])
def test_half_precision_weights_are_computed_in_float32_and_rounded_once(dtype, clip):
    weight = nn.Parameter(torch.randn(50, 40, generator=torch.Generator().manual_seed(0)).to(dtype))
    factor = torch.randn(50, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = weight.detach().float()
    optimizer = Lomo([weight], lr=0.3, weight_decay=0.01, clip_grad_norm=clip)
    optimizer.backward((weight.float() * factor.float()).sum())
    gradient = factor.float()
    if clip is not None:
        gradient = gradient * (clip / (gradient.norm() + 1e-6)).clamp(max=1.0)
    expected = before * (1 - 0.3 * 0.01) - 0.3 * gradient
    rounded = expected.to(dtype)
    off = (weight.detach() != rounded).float().mean().item()  # on a boundary, another order of operations may differ
    assert off < 0.01
    torch.testing.assert_close(weight.detach(), rounded, rtol=2**-7, atol=0)


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
def test_weights_in_another_memory_format_are_updated(kind):
    ours, theirs = build().to(memory_format=torch.channels_last), build()
    train(ours, kind(ours.parameters(), lr=2e-2), 3)
    train(theirs, kind(theirs.parameters(), lr=2e-2), 3)
    assert not ours.convolution.weight.is_contiguous()
    assert greatest_difference(ours, theirs) <= 1e-6


def test_large_tensors_are_computed_in_pieces_to_the_same_bits(monkeypatch):
    def trained():
        model = build().bfloat16()
        train(model, Lomo(model.parameters(), lr=0.1, weight_decay=0.1, clip_grad_norm=0.1), 3, batch=half)
        return weights_of(model)

    def half(step):
        return Shapes.batch(step).bfloat16()

    whole = trained()
    monkeypatch.setattr("tr_optim.engine.precision.piece_size", lambda tensor: 7)
    assert_same_bits(trained(), whole)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_tied_and_repeated_weights_are_updated_once(clip, reentrant):
    ours, theirs = build(Tied, reentrant=reentrant), build(Tied)
    optimizer = Lomo(ours.parameters(), lr=0.2, clip_grad_norm=clip)
    norms = train(ours, optimizer, 6, max_norm=clip)
    expected = train_plainly(theirs, torch.optim.SGD(theirs.parameters(), lr=0.2), 6, max_norm=clip)
    assert greatest_difference(ours, theirs) <= 1e-6
    assert norms == pytest.approx(expected, rel=1e-5)


def test_a_weight_that_is_reached_in_parts_without_warning_is_an_error():
    model = build(Tied, reentrant=None)
    optimizer = Lomo(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    model.reentrant = True
    with pytest.raises(RuntimeError, match="in several parts in one backward pass"):
        optimizer.backward(loss_of(model, model.batch(1)))
    optimizer.zero_grad()
    train(model, optimizer, 1)


def test_gradients_are_gone_and_never_more_than_one_is_there():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(10)))
    optimizer = Lomo(model.parameters(), lr=0.1)
    held = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: held.append(sum(p.grad is not None for p in model.parameters())))
    optimizer.backward(loss_of(model, torch.randn(2, 8)))
    assert len(held) == 20
    assert max(held) <= 1
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state


def test_a_plain_backward_changes_no_weight_and_leaves_its_gradient():
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    before = weights_of(model)
    loss_of(model, model.batch(5)).backward()
    assert_same_bits(weights_of(model), before)
    assert model.head.weight.grad is not None
    with pytest.raises(RuntimeError, match=r"step\(\) has nothing to apply: Lomo updates during its own backward pass"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"holds a gradient that this backward pass did not make.*zero_grad\(\)"):
        optimizer.backward(loss_of(model, model.batch(6)))
    assert_same_bits(weights_of(model), before)
    optimizer.zero_grad()
    train(model, optimizer, 1)


def test_parameters_may_be_frozen_and_thawed_between_steps():
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    model.head.requires_grad_(False)
    frozen = model.head.weight.detach().clone()
    train(model, optimizer, 1, start=1)
    assert torch.equal(model.head.weight, frozen)
    model.head.requires_grad_(True)
    train(model, optimizer, 1, start=2)
    assert not torch.equal(model.head.weight, frozen)


def test_a_graph_that_still_needs_an_old_weight_is_noticed():
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1)
    loss = loss_of(model, model.batch(0))
    other = loss + model.head.weight.square().sum()
    optimizer.backward(loss_of(model, model.batch(1)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def calls_in_a_step(num_layers):
    """Count the Python functions that a step enters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optimizer = Lomo(model.parameters(), lr=0.1)
    train(model, optimizer, 1, batch=lambda step: torch.ones(2, 4))
    loss, calls = loss_of(model, torch.ones(2, 4)), 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        optimizer.backward(loss)
    finally:
        sys.setprofile(None)
    return calls


def test_a_step_costs_a_fixed_number_of_calls_for_each_tensor():
    small, large = calls_in_a_step(50), calls_in_a_step(400)  # 100 and 800 tensors
    for_each_tensor = (large - small) / 700
    assert 1 <= for_each_tensor < 40
    assert large <= small * 8 * 1.01


@pytest.mark.parametrize("clip", [None, 0.05])
def test_small_gradients_that_are_used_together_give_the_same_weights(monkeypatch, clip):
    class Mixed(nn.Module):
        """Has more small tensors than are used at a time, in two precisions and two groups."""

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(90))
            for layer in self.layers[::3]:
                layer.bfloat16()

        def forward(self, hidden):
            for layer in self.layers:
                hidden = hidden + torch.tanh(layer(hidden.to(layer.weight.dtype)))
            return hidden.float()

    def trained():
        model = build(Mixed)
        groups = parameter_groups(model, weight_decay=0.1)
        optimizer = Lomo(groups, lr=1e-2, clip_grad_norm=clip)
        norms = train(model, optimizer, 3, max_norm=clip, batch=lambda step: torch.ones(2, 4) + step)
        return weights_of(model), norms

    together, norms = trained()
    monkeypatch.setattr("tr_optim.engine.fused_passes._JOINED", -1)
    one_by_one, expected = trained()
    assert_same_bits(together, one_by_one)
    assert norms == pytest.approx(expected, rel=1e-6)


def test_a_failed_backward_leaves_an_optimizer_that_goes_on():
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1)
    train(model, optimizer, 1)
    handle = model.norm.weight.register_hook(lambda _: (_ for _ in ()).throw(MemoryError("full")))
    with pytest.raises(MemoryError):
        optimizer.backward(loss_of(model, model.batch(1)))
    handle.remove()
    optimizer.zero_grad()
    train(model, optimizer, 1)


def test_a_second_backward_in_one_step_is_refused_before_it_changes_anything():
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1)
    optimizer.backward(loss_of(model, model.batch(0)))
    before = weights_of(model)
    with pytest.raises(RuntimeError, match=r"a second backward\(\) in one step: Lomo has applied the first one's"):
        optimizer.backward(loss_of(model, model.batch(1)))
    assert_same_bits(weights_of(model), before)


def test_micro_batches_are_refused_with_what_to_do_instead():
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1)
    before = weights_of(model)
    with pytest.raises(
        ValueError,
        match="Lomo applies and frees each gradient.*gradient_checkpointing=True; or an optimizer.*galore_adamw_layer"
        "wise; or sgd, which does the same.*accumulate='store'",
    ):
        optimizer.backward(loss_of(model, model.batch(0)), last=False)
    assert_same_bits(weights_of(model), before)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_of_parameters_that_are_not_its_own_are_computed_once_and_stay(clip, reentrant):
    ours, theirs = build(Tied, reentrant=reentrant), build(Tied)
    first, second = nn.Linear(7, 7), nn.Linear(7, 7)
    second.load_state_dict(first.state_dict())
    first.bias.grad, second.bias.grad = torch.ones(7), torch.ones(7)
    optimizer = Lomo(ours.parameters(), lr=0.1, clip_grad_norm=clip)
    optimizer.backward(first(ours(ours.batch(0))).square().mean())
    second(theirs(theirs.batch(0))).square().mean().backward()
    torch.testing.assert_close(first.weight.grad, second.weight.grad)
    torch.testing.assert_close(first.bias.grad, second.bias.grad)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_stored_micro_batches_equal_one_large_batch(clip):
    ours, theirs = build(), build()
    optimizer = Lomo(ours.parameters(), lr=0.3, clip_grad_norm=clip, accumulate="store")
    norms = []
    for step in range(4):
        parts = ours.batch(step, 8).split(2)
        for number, part in enumerate(parts, start=1):
            optimizer.backward(loss_of(ours, part) / len(parts), last=number == len(parts))
            assert (ours.head.weight.grad is None) == (number == len(parts))
        norms.append(optimizer.clip_grad_norm(clip).item())
        optimizer.step()
    plain = torch.optim.SGD(theirs.parameters(), lr=0.3)
    expected = train_plainly(theirs, plain, 4, max_norm=clip, batch=lambda step: theirs.batch(step, 8))
    assert greatest_difference(ours, theirs) <= 1e-6
    assert norms == pytest.approx(expected, rel=1e-5)
    assert optimizer.num_passes == 16, "the gradients are all there, so that no second pass is needed"


def test_stored_gradients_are_not_mixed_with_those_of_a_plain_backward():
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1, accumulate="store")
    loss_of(model, model.batch(0)).backward()
    with pytest.raises(RuntimeError, match="gradients that this step's backward passes did not make"):
        optimizer.backward(loss_of(model, model.batch(1)), last=False)


def test_clipping_that_comes_too_late_is_refused():
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match=r"there is no gradient norm: call backward\(loss\) of Lomo first"):
        optimizer.clip_grad_norm(None)
    optimizer.backward(loss_of(model, model.batch(0)))
    with pytest.raises(
        ValueError, match=r"clip_grad_norm\(1\) comes too late.*without clipping; build it with clip_grad"
    ):
        optimizer.clip_grad_norm(1.0)
    clipping = Lomo(model.parameters(), lr=0.1, clip_grad_norm=0.5)
    with pytest.raises(ValueError, match=r"built with clip_grad_norm=0\.5, but its loop clips to 1 \(max_grad_norm\)"):
        clipping.clip_to(1.0)
    clipping.clip_to(None)
    clipping.clip_to(0.5)


def test_a_loop_that_clips_may_say_so_before():
    ours, theirs = build(), build()
    optimizer = Lomo(ours.parameters(), lr=0.1)
    optimizer.clip_to(0.05)
    train(ours, optimizer, 4, max_norm=0.05)
    train(theirs, Lomo(theirs.parameters(), lr=0.1, clip_grad_norm=0.05), 4, max_norm=0.05)
    assert_same_bits(weights_of(ours), weights_of(theirs))


@pytest.mark.parametrize("clip", [None, 0.05])
def test_a_step_that_is_not_finite_is_left_out_whole_on_request(clip):
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1, weight_decay=0.1, clip_grad_norm=clip, nonfinite="skip_step")
    train(model, optimizer, 1, max_norm=clip)
    before = weights_of(model)
    handle = model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    optimizer.backward(loss_of(model, model.batch(1)))
    handle.remove()
    assert optimizer.found_inf.item() == 1.0
    assert not optimizer.clip_grad_norm(clip).isfinite()
    optimizer.step()
    assert_same_bits(weights_of(model), before)
    train(model, optimizer, 1, start=2, max_norm=clip)
    assert optimizer.found_inf.item() == 0.0
    assert greatest_difference(model, build()) > 0


def test_a_step_whose_loss_alone_is_not_finite_is_left_out_too():
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1, nonfinite="skip_step")
    before = weights_of(model)
    optimizer.backward(loss_of(model, model.batch(0)) + torch.inf)
    assert_same_bits(weights_of(model), before)
    optimizer.step()
    train(model, optimizer, 1)
    assert not torch.equal(model.head.weight, before["head.weight"])


def test_tensors_whose_gradient_is_not_finite_are_left_out_on_request():
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1, nonfinite="skip_tensor")
    before = weights_of(model)
    model.norm.weight.register_hook(lambda gradient: gradient * torch.nan)
    optimizer.backward(loss_of(model, model.batch(0)))
    after = weights_of(model)
    assert torch.equal(after["norm.weight"], before["norm.weight"])
    assert not torch.equal(after["head.weight"], before["head.weight"])
    assert optimizer.num_passes == 1


def test_what_is_not_finite_is_applied_without_a_request_as_any_optimizer_does():
    model = build()
    optimizer = Lomo(model.parameters(), lr=0.1)
    optimizer.backward(loss_of(model, model.batch(0)) * torch.nan)
    assert model.head.weight.isnan().all()
    assert optimizer.found_inf.item() == 1.0


def arguments(**changes):
    known = {
        "learning_rate": 0.1,
        "optim_args": None,
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 1.0,
        "on_nonfinite": "allow",
    }
    return types.SimpleNamespace(**{**known, **changes})


def from_arguments(**changes):
    groups = [{"params": [nn.Parameter(torch.ones(2, 2))], "weight_decay": 0.1}]
    return Lomo.from_arguments(groups, arguments(**changes))


def test_training_arguments_set_rate_decay_and_clipping():
    optimizer = from_arguments()
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (0.1, 0.1)
    optimizer.clip_to(1.0)
    with pytest.raises(ValueError, match="built with clip_grad_norm=1, but"):
        optimizer.clip_to(2.0)
    assert from_arguments(on_nonfinite="skip").leaves_out_nonfinite
    unclipped = from_arguments(max_grad_norm=0.0)
    unclipped.backward(unclipped.param_groups[0]["params"][0].sum())
    assert unclipped.num_passes == 1


def test_training_arguments_that_it_cannot_follow_are_refused():
    with pytest.raises(
        ValueError, match="optim='lomo' with gradient_accumulation_steps=4: lomo applies and frees each gradient"
    ):
        from_arguments(gradient_accumulation_steps=4)
    from_arguments(gradient_accumulation_steps=4, optim_args="accumulate=store")
    with pytest.raises(ValueError, match=r"max_grad_norm=1 and clip_grad_value=0.5 \(optim_args\) both clip"):
        from_arguments(optim_args="clip_grad_value=0.5")
    from_arguments(optim_args="clip_grad_value=0.5", max_grad_norm=0)
    with pytest.raises(
        ValueError, match="lomo does not take 'momentum'; it takes accumulate, clip_grad_value, nonfinite"
    ):
        from_arguments(optim_args="momentum=0.9")


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
def test_nothing_small_is_made_and_kept_between_large_gradients(monkeypatch, kind):
    """It would keep the allocator from joining the memory that these leave behind."""
    kept = []

    class Watched(kind):
        def update(self, parameter, gradient, factor, leave_out):
            super().update(parameter, gradient, factor, leave_out)
            kept.append((parameter.numel(), len(self._small._waiting), len(self._norms._of)))

    monkeypatch.setattr("tr_optim.engine.fused_passes._JOINED", 99)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(4)))
    optimizer = Watched(model.parameters(), lr=1e-2)
    for _ in range(2):
        kept.clear()
        optimizer.backward(model(torch.ones(2, 10)).square().mean())
        assert [waiting + norms for size, waiting, norms in kept if size == 100] == [0] * 4
        optimizer.step()
