"""The random numbers of a Mac's device are part of a checkpoint."""

import pytest
import torch

from tr_ckpt import Checkpointer, RNGState


@pytest.fixture
def generator(monkeypatch):
    """A Mac's generator, played by one of the CPU."""
    played = torch.Generator().manual_seed(3)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.mps, "get_rng_state", played.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", played.set_state)
    return played


def test_a_checkpoint_holds_the_generator_of_a_mac(tmp_path, generator, caplog):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"rng": RNGState()})
    drawn = torch.rand(4, generator=generator)
    assert checkpointer.restore({"rng": RNGState()}) == 1
    assert torch.equal(torch.rand(4, generator=generator), drawn)
    assert caplog.records == []


def test_a_checkpoint_of_a_mac_restores_elsewhere_and_says_what_it_leaves_out(tmp_path, generator, monkeypatch, caplog):
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"rng": RNGState()})
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 0)
    assert checkpointer.restore({"rng": RNGState()}) == 1
    assert "1 of 1 saved mps random states are not restored: this process sees 0 such devices" in caplog.messages
