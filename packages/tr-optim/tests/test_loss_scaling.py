import copy
import types

import pytest
import torch
from fused_models import assert_same_bits, build, copy_of_state, greatest_difference, loss_of, train, weights_of
from torch import nn

from tr_optim import AdaLomo, Lomo, LossScaler

SCALES = {"init_scale": 1024.0, "growth_interval": 2}
# Steps in which a gradient overflows.
BAD = (1, 4, 5)


def spoil(model, step):
    """Have the gradients of two parameters overflow in a bad step."""
    value = torch.inf if step in BAD else 1.0
    return [p.register_hook(lambda gradient: gradient * value) for p in (model.experts, model.norm.bias)]


def train_scaled(model, optimizer, scaler, steps, clip=None, seen=None):
    for step in steps:
        handles = spoil(model, step)
        scaler.backward(optimizer, loss_of(model, model.batch(step)))
        optimizer.clip_grad_norm(clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for handle in handles:
            handle.remove()
        if seen is not None:
            seen.append((scaler.get_scale(), weights_of(model), copy_of_state(optimizer)["state"]))


def train_as_torch(model, optimizer, scaler, steps, clip=None):
    seen = []
    for step in steps:
        handles = spoil(model, step)
        optimizer.zero_grad()
        scaler.scale(loss_of(model, model.batch(step))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), torch.inf if clip is None else clip)
        scaler.step(optimizer)
        scaler.update()
        for handle in handles:
            handle.remove()
        seen.append(scaler.get_scale())
    return seen


@pytest.mark.parametrize("clip", [None, 0.05])
def test_scale_and_weights_are_those_of_torchs_scaler(clip):
    ours, theirs, seen = build(), build(), []
    scaler, torchs = LossScaler("cpu", **SCALES), torch.amp.GradScaler("cpu", **SCALES)
    train_scaled(ours, Lomo(ours.parameters(), lr=0.1, clip_grad_norm=clip), scaler, range(10), clip, seen)
    scales = train_as_torch(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), torchs, range(10), clip)
    assert [scale for scale, _, _ in seen] == scales
    assert len(set(scales)) >= 3, "it must both grow and fall"
    assert greatest_difference(ours, theirs) <= 1e-7
    assert scaler.state_dict() == torchs.state_dict()


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_an_overflow_leaves_weights_and_states_bit_for_bit(kind, clip):
    model, seen = build(), []
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1, clip_grad_norm=clip)
    train_scaled(model, optimizer, LossScaler("cpu", **SCALES), range(7), clip, seen)
    for step in range(1, 7):
        (_, weights, states), (_, before, states_before) = seen[step], seen[step - 1]
        if step in BAD:
            assert_same_bits(weights, before)
            for number, state in states.items():
                assert_same_bits(state, states_before[number])
        else:
            assert not torch.equal(weights["head.weight"], before["head.weight"])
    assert optimizer.num_passes == 14, "whether to step has to be known first"


def test_leaving_out_single_tensors_takes_one_pass_and_is_asked_for_by_name():
    model, seen = build(), []
    optimizer = Lomo(model.parameters(), lr=0.1, nonfinite="skip_tensor")
    scaler = LossScaler("cpu", **SCALES)
    train_scaled(model, optimizer, scaler, range(2), None, seen)
    (_, before, _), (scale, after, _) = seen
    assert torch.equal(after["experts"], before["experts"])
    assert torch.equal(after["norm.bias"], before["norm.bias"])
    assert not torch.equal(after["head.weight"], before["head.weight"])
    assert scale == 512.0
    assert optimizer.num_passes == 2


def test_its_state_is_torchs_and_goes_on_after_a_resume():
    whole = build()
    scaler = LossScaler("cpu", **SCALES)
    optimizer = AdaLomo(whole.parameters(), lr=1e-2)
    train_scaled(whole, optimizer, scaler, range(4))
    model, saved, state = copy.deepcopy(whole), scaler.state_dict(), copy_of_state(optimizer)
    train_scaled(whole, optimizer, scaler, range(4, 9))
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(saved)
    resumed, resumed_scaler = AdaLomo(model.parameters(), lr=1e-2), LossScaler("cpu")
    resumed.load_state_dict(state)
    resumed_scaler.load_state_dict(torchs.state_dict())
    train_scaled(model, resumed, resumed_scaler, range(4, 9))
    assert_same_bits(weights_of(model), weights_of(whole))
    assert resumed_scaler.state_dict() == scaler.state_dict()


def test_an_ordinary_optimizer_is_scaled_as_by_torch():
    ours, theirs = build(), build()
    scaler, torchs = LossScaler("cpu", **SCALES), torch.amp.GradScaler("cpu", **SCALES)
    found = train_as_torch(ours, torch.optim.SGD(ours.parameters(), lr=0.1), scaler, range(7))
    expected = train_as_torch(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1), torchs, range(7))
    assert found == expected
    assert_same_bits(weights_of(ours), weights_of(theirs))


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_optimizer_gets_the_last_micro_batch_and_the_scale(last, enabled):
    asked = []
    optimizer = types.SimpleNamespace(backward=lambda loss, **options: asked.append((loss.item(), options)))
    LossScaler("cpu", init_scale=4.0, enabled=enabled).backward(optimizer, torch.tensor(3.0), last=last)
    [(loss, options)] = asked
    scale = options.pop("scale")
    assert (loss, options) == (3.0, {"last": last})
    assert scale is None if not enabled else scale.item() == 4.0


class Deferred:
    """Keeps what the backward pass gave until `step`."""

    fused_in_backward, updates_in_backward = True, False

    def __init__(self):
        self.found_inf, self.steps = None, 0

    def backward(self, loss, *, last=True, scale=None):
        self.found_inf = (~(loss.detach() * scale).isfinite()).float()

    def step(self):
        self.steps += 1


def test_of_one_that_updates_in_step_an_overflow_leaves_out_the_step():
    optimizer, scaler = Deferred(), LossScaler("cpu", **SCALES)
    for loss in (torch.tensor(1.0), torch.tensor(torch.inf), torch.tensor(2.0)):
        scaler.backward(optimizer, loss)
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.steps == 2
    assert scaler.get_scale() == 512.0


def test_without_scaling_it_does_nothing():
    ours, theirs = build(), build()
    scaler, optimizer = LossScaler("cpu", enabled=False), Lomo(ours.parameters(), lr=0.1)
    scaler.backward(optimizer, loss_of(ours, ours.batch(0)))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    train(theirs, Lomo(theirs.parameters(), lr=0.1), 1)
    assert_same_bits(weights_of(ours), weights_of(theirs))
    assert optimizer.num_passes == 1
    assert scaler.state_dict() == {}


def test_calls_in_another_order_are_refused_as_by_torch():
    model = build()
    optimizer, scaler = Lomo(model.parameters(), lr=0.1), LossScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(
        RuntimeError, match=r"Lomo has found nothing yet; call scaler.backward\(optimizer, loss\) first"
    ):
        scaler.step(optimizer)
    scaler.backward(optimizer, loss_of(model, model.batch(0)))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer since"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update"):
        scaler.step(optimizer)


@pytest.mark.parametrize("kind", [Lomo, AdaLomo])
def test_small_gradients_of_float16_weights_are_divided_in_float32(kind):
    """Without that, those below 2**-24 of the unscaled loss would be 0."""
    weight = nn.Parameter(torch.full((4, 4), 0.5, dtype=torch.float16))
    optimizer, scaler = kind([weight], lr=1e3), LossScaler("cpu", init_scale=2.0**16)
    scaler.backward(optimizer, (weight.float() * 2.0**-26).sum())
    assert optimizer.clip_grad_norm(None).item() == pytest.approx(4 * 2.0**-26, rel=1e-6)
    assert (weight < 0.5).all() or kind is Lomo  # AdaLomo's step does not depend on the gradient's size
    scaler.step(optimizer)
