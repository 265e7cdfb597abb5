"""Which Macs and settings train on the mps device; how it trains is seen on a Mac, and on a substitute in tests/."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tr_dist.base import skips_on_device
from tr_dist.mps import MPS


@pytest.fixture
def mac(monkeypatch):
    """A Mac with macOS 14, as far as asking goes."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (14, 0))


def arguments(**given):
    return SimpleNamespace(**{"bf16": False, "fp16": False, "use_cpu": False, **given})


@pytest.mark.parametrize(
    ("is_built", "said"), [(False, "is built without it"), (True, "macOS is older than 14, or its GPU is not Apple's")]
)
def test_where_there_is_no_such_device_the_strategy_says_why(monkeypatch, is_built, said):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: is_built)
    with pytest.raises(ValueError, match=f"needs a Mac's GPU, and torch has none.*{said}.*set strategy='auto'"):
        MPS()


@pytest.mark.parametrize(
    ("given", "dtype", "scales"),
    [({}, None, False), ({"bf16": True}, torch.bfloat16, False), ({"fp16": True}, torch.float16, True)],
)
def test_the_precision_is_that_of_the_arguments(mac, monkeypatch, given, dtype, scales):
    monkeypatch.setattr(torch, "__version__", "2.8.0")  # the lowest with all of them
    strategy = MPS.from_arguments(arguments(**given))
    assert (strategy.device.type, strategy._precision.dtype) == ("mps", dtype)
    assert (strategy._precision.scaler is not None) == scales
    assert ("scaler" in strategy.state_parts(nn.Linear(1, 1), None)) == scales


def test_bfloat16_needs_macos_14(mac, monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (13, 3))
    with pytest.raises(ValueError, match="bf16=True on the mps device needs macOS 14; use fp16=True, or update"):
        MPS(precision="bf16")


def test_float16_needs_a_torch_whose_scaler_computes_in_32_bits(mac, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1")
    with pytest.raises(ValueError, match=r"needs torch 2.8: loss scaling of torch 2.7.1 computes in 64 bits"):
        MPS(precision="fp16")
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    assert MPS(precision="fp16")._precision.scaler is not None


def test_the_cpu_and_this_strategy_contradict_each_other(mac):
    with pytest.raises(ValueError, match="strategy='mps' and use_cpu=True contradict each other"):
        MPS.from_arguments(arguments(use_cpu=True))


def test_several_processes_are_refused(mac, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "TR_RENDEZVOUS_FILE": "x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"in one of 2 processes \(WORLD_SIZE\): neither gloo nor nccl carries"):
        MPS()


def test_what_is_64_bits_wide_is_refused_by_name(mac):
    model = nn.Sequential(nn.Linear(2, 2).double(), *(nn.BatchNorm1d(2).double() for _ in range(2)))
    with pytest.raises(ValueError) as caught:
        MPS().prepare(model)
    said = str(caught.value)
    assert said.startswith("10 tensors of Sequential are 64 bits wide, which the mps device cannot compute with: ")
    assert "0.weight (torch.float64), 0.bias (torch.float64)" in said
    assert "and 5 more; use model.float(), or use_cpu=True" in said
    model = nn.Linear(2, 2)
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match=r"1 tensors of Linear are.*: phases \(torch.complex128\)"):
        MPS().prepare(model)


def test_what_other_errors_say_stays_as_it_is(mac):
    with pytest.raises(NotImplementedError) as caught, MPS().accumulate(nn.Linear(1, 1), sync=True):
        raise NotImplementedError("forward is missing")
    assert not hasattr(caught.value, "__notes__")


def test_a_flag_to_leave_out_an_update_is_read_on_a_mac():
    """Some versions of torch have fused optimizers there that do not look at it."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], fused=True)
    assert skips_on_device(optimizer)
    optimizer.param_groups[0]["params"] = [SimpleNamespace(is_mps=True)]
    assert not skips_on_device(optimizer)


mps_only = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs a Mac's GPU")


@pytest.mark.mps
@mps_only
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
def test_a_small_model_learns_on_a_mac(precision):
    torch.manual_seed(0)
    inputs = torch.randn(64, 8)
    targets = inputs.sum(dim=1, keepdim=True)
    with MPS(precision=precision) as strategy:
        model = strategy.prepare(nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for _ in range(60):
            with strategy.accumulate(model, sync=True):
                with strategy.autocast():
                    loss = nn.functional.mse_loss(model(inputs.to(strategy.device)), targets.to(strategy.device))
                strategy.backward(loss)
            strategy.clip_grad_norm(model, optimizer, 1.0)
            strategy.step(optimizer)
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < losses[0] / 10


@pytest.mark.mps
@mps_only
def test_the_random_numbers_of_a_mac_can_be_put_back():
    state = torch.mps.get_rng_state()
    first = torch.rand(3, device="mps").cpu()
    torch.mps.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="mps").cpu(), first)
