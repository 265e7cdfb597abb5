"""LOMO and AdaLomo give the weights of their authors' package, where that is right; where it is not, ours are."""

import copy
import sys

import pytest
import torch
from parity_lomo import Network, batches, rates
from torch import nn

with pytest.MonkeyPatch.context() as patch:
    # The package asks where accelerate's launcher says so; without one, it is alone.
    patch.delenv("WORLD_SIZE", raising=False)
    lomo_optim = pytest.importorskip("lomo_optim")

from tr_optim import AdaLomo, Lomo


def train_theirs(optimizer, model, clip=None):
    for inputs, rate in zip(batches(), rates(), strict=True):
        loss = model(inputs)
        if clip is not None:
            optimizer.grad_norm(loss)
        optimizer.fused_backward(loss, rate)


def train_ours(optimizer, model):
    for inputs, rate in zip(batches(), rates(), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.backward(model(inputs))
        optimizer.step()


def assert_close(first, second, tolerance=1e-7):
    for mine, theirs in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clipping", [{}, {"clip_grad_norm": 0.05}, {"clip_grad_value": 0.005}])
def test_lomo_gives_the_same_weights(decay, clipping):
    ours, theirs = Network(), Network()
    train_ours(Lomo(ours.parameters(), lr=0.1, weight_decay=decay, **clipping), ours)
    train_theirs(
        lomo_optim.Lomo(theirs, lr=0.1, weight_decay=decay, **clipping), theirs, clipping.get("clip_grad_norm")
    )
    assert_close(ours, theirs)


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_adalomo_gives_the_same_weights(monkeypatch, decay, clip):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)  # it cannot be built without a GPU
    ours, theirs = Network(), Network()
    train_ours(AdaLomo(ours.parameters(), lr=0.1, weight_decay=decay, clip_grad_norm=clip), ours)
    reference = lomo_optim.AdaLomo(theirs, lr=0.1, weight_decay=decay, clip_grad_norm=clip)
    train_theirs(reference, theirs, clip)
    assert_close(ours, theirs, 5e-7)


def test_a_plain_backward_trains_with_theirs_and_not_with_ours():
    def moved(model):
        fresh = Network()
        return sum(not torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))

    ours, theirs = Network(), Network()
    kept = [Lomo(ours.parameters(), lr=0.1), lomo_optim.Lomo(theirs, lr=0.1)]
    ours(batches()[0]).backward()
    theirs(batches()[0]).backward()
    assert (moved(ours), moved(theirs)) == (0, 5)
    del kept


def test_adalomo_remembers_its_moments_in_a_saved_state_as_theirs_does_not(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)
    theirs, ours = Network(), Network()
    reference, optimizer = lomo_optim.AdaLomo(theirs, lr=0.1), AdaLomo(ours.parameters(), lr=0.1)
    train_theirs(reference, theirs)
    train_ours(optimizer, ours)
    assert reference.state_dict()["state"] == {}
    whole, saved = copy.deepcopy(ours), copy.deepcopy(optimizer.state_dict())
    resumed = AdaLomo(whole.parameters(), lr=0.1)
    resumed.load_state_dict(saved)
    train_ours(resumed, whole)
    train_ours(optimizer, ours)
    assert_close(whole, ours, 0)


def calls(num_layers, ours):
    """Count the Python functions that a backward pass with updates enters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))
    optimizer = Lomo(model.parameters(), lr=0.1) if ours else lomo_optim.Lomo(model, lr=0.1)
    step = optimizer.backward if ours else lambda loss: optimizer.fused_backward(loss, 0.1)
    step(model(torch.ones(2, 4)).square().mean())
    if ours:
        optimizer.step()
    loss, number = model(torch.ones(2, 4)).square().mean(), 0

    def count(frame, event, argument):
        nonlocal number
        number += event == "call"

    sys.setprofile(count)
    try:
        step(loss)
    finally:
        sys.setprofile(None)
    return number


def test_the_cost_of_a_tensor_is_fixed_with_ours_and_grows_with_the_model_with_theirs():
    ours, theirs = [calls(number, True) for number in (20, 80)], [calls(number, False) for number in (20, 80)]
    assert ours[1] <= ours[0] * 4
    assert theirs[1] >= theirs[0] * 8
