import pytest
import torch
from torch import nn

from tr_dist.mixed_precision import MixedPrecision

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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_float16_has_a_scaler_on_cuda():
    assert MixedPrecision("fp16", torch.device("cuda")).scaler is not None
