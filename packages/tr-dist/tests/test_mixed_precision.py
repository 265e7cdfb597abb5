import pytest
import torch
from torch import nn

from tr_dist.base import MixedPrecision, skips_on_device

CPU = torch.device("cpu")


def _scaled():
    """Scaled gradients on the CPU, where torch's scaler works though float16 is refused."""
    precision = MixedPrecision("no", CPU)
    precision.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model = nn.Linear(2, 1)
    return precision, model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_scaled_gradients_are_applied_at_their_true_size():
    precision, model, optimizer = _scaled()
    before = model.weight.detach().clone()
    precision.backward(model(torch.ones(1, 2)).sum())
    assert model.weight.grad.tolist() == [[1024.0, 1024.0]]
    precision.unscale(optimizer)
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    assert precision.step(optimizer) is True
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_an_overflow_leaves_the_step_out_and_says_so():
    precision, model, optimizer = _scaled()
    before = model.weight.detach().clone()
    precision.backward(model(torch.full((1, 2), float("inf"))).sum())
    assert precision.step(optimizer) is False
    assert torch.equal(model.weight, before)
    optimizer.zero_grad()
    precision.backward(model(torch.ones(1, 2)).sum())
    assert precision.step(optimizer) is True


@pytest.mark.parametrize("scaler", [False, True], ids=["no scaler", "scaler"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_left_out_where_a_flag_is_set_and_that_is_no_overflow(scaler, fused):
    precision, model, _ = _scaled()
    if not scaler:
        precision.scaler = None
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    seen = []
    for skip in (False, True, False):
        before = model.weight.detach().clone()
        precision.backward(model(torch.ones(1, 2)).sum())
        precision.unscale(optimizer)
        assert precision.step(optimizer, skip=torch.tensor(skip)) is True
        optimizer.zero_grad()
        seen.append((torch.equal(model.weight, before), int(optimizer.state[model.weight]["step"])))
    assert seen == [(False, 1), (True, 1), (False, 2)]
    assert not {"found_inf", "grad_scale"} & set(vars(optimizer))


def test_fused_sgd_with_momentum_is_not_left_out_on_the_device():
    """torch gives its buffers uninitialised memory in a first step that is left out there."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
    assert not skips_on_device(optimizer)
    assert skips_on_device(torch.optim.SGD([weight], lr=0.1, fused=True))
    weight.grad = torch.full((3,), float("nan"))
    MixedPrecision("no", CPU).step(optimizer, skip=torch.ones(()))
    assert (weight.tolist(), dict(optimizer.state)) == ([1.0] * 3, {})


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float16_has_a_scaler_on_cuda():
    assert MixedPrecision("fp16", torch.device("cuda")).scaler is not None
