"""Random numbers go on where they were."""

import random
import sys

import pytest
import torch
from ckpt_parts import Values

from tr_ckpt import Checkpointer, RNGState


def draw():
    drawn = [random.random(), random.gauss(0, 1), torch.rand(3).tolist()]
    if "numpy" in sys.modules:
        drawn += [sys.modules["numpy"].random.rand(3).tolist(), sys.modules["numpy"].random.randn()]
    return drawn


def test_all_generators_go_on_where_they_were(tmp_path):
    pytest.importorskip("numpy")
    draw()  # an odd number of normal draws: half of a pair is kept inside the generators
    Checkpointer(tmp_path).save(1, {"rng": RNGState()})
    expected = [draw() for _ in range(3)]
    random.seed(1)
    torch.manual_seed(1)
    sys.modules["numpy"].random.seed(1)
    Checkpointer(tmp_path).restore({"rng": RNGState()})
    assert [draw() for _ in range(3)] == expected


def test_taking_the_state_draws_nothing():
    random.seed(3)
    torch.manual_seed(3)
    before = RNGState().state_dict()
    expected = draw()[:3]
    RNGState().load_state_dict(before)
    RNGState().state_dict()
    assert draw()[:3] == expected


def test_numpy_is_not_imported_for_its_state(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy", raising=False)
    assert "numpy" not in RNGState().state_dict()


def test_a_device_is_not_initialised_for_its_state(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert "cuda" not in RNGState().state_dict()


class Device:
    """Stands for `torch.cuda` on a machine with devices: generators that are numbers."""

    def __init__(self, count):
        self.states = [torch.tensor([index]) for index in range(count)]

    def device_count(self):
        return len(self.states)

    def is_available(self):
        return bool(self.states)

    def is_initialized(self):
        return bool(self.states)

    def get_rng_state_all(self):
        return [state.clone() for state in self.states]

    def set_rng_state(self, state, index=0):
        self.states[index] = state


@pytest.mark.parametrize(
    ("saved", "present", "restored", "message"),
    [
        (2, 2, [10, 11], None),
        (2, 1, [10], "1 of 2 saved cuda random states are not restored: this process sees 1 such devices"),
        (2, 0, [], "2 of 2 saved cuda random states are not restored: this process sees 0 such devices"),
        (1, 2, [10, 1], "1 cuda random states stay unchanged: the checkpoint holds 1"),
        (0, 1, [0], "1 cuda random states stay unchanged: the checkpoint holds 0"),
    ],
)
def test_devices_that_differ_are_named(saved, present, restored, message, monkeypatch, caplog, tmp_path):
    """Where there is no device, what is used of `torch.cuda` is stood in for; the test below needs one."""
    there = Device(saved)
    there.states = [state + 10 for state in there.states]
    monkeypatch.setattr(torch, "cuda", there)
    Checkpointer(tmp_path).save(1, {"rng": RNGState(), "model": Values(1)})
    here = Device(present)
    monkeypatch.setattr(torch, "cuda", here)
    Checkpointer(tmp_path).restore({"rng": RNGState()})
    assert [int(state) for state in here.states] == restored
    assert (message in caplog.text) if message else not caplog.text


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_generator_goes_on_where_it_was(tmp_path):
    torch.rand(2, device="cuda")
    Checkpointer(tmp_path).save(1, {"rng": RNGState()})
    expected = torch.rand(5, device="cuda")
    torch.cuda.manual_seed(5)
    Checkpointer(tmp_path).restore({"rng": RNGState()})
    assert torch.equal(torch.rand(5, device="cuda"), expected)
