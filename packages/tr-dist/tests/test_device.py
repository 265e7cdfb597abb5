import pytest
import torch

from tr_dist import LaunchEnvironment, rank_device

SECOND = LaunchEnvironment(rank=1, world_size=2, local_rank=1, local_world_size=2)


def _with_cuda_devices(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_a_rank_takes_the_visible_device_of_its_local_rank(monkeypatch):
    _with_cuda_devices(monkeypatch, 2)
    assert rank_device(SECOND) == torch.device("cuda", 1)


def test_no_visible_device_means_the_cpu(monkeypatch):
    _with_cuda_devices(monkeypatch, 0)
    assert rank_device(SECOND) == torch.device("cpu")


def test_the_cpu_can_be_asked_for(monkeypatch):
    _with_cuda_devices(monkeypatch, 2)
    assert rank_device(SECOND, use_cpu=True) == torch.device("cpu")


def test_more_processes_than_visible_devices_are_refused(monkeypatch):
    _with_cuda_devices(monkeypatch, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(
        ValueError, match=r"LOCAL_RANK=1 has no CUDA device: 1 visible here \(CUDA_VISIBLE_DEVICES='3'\)"
    ):
        rank_device(SECOND)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES is not set"):
        rank_device(SECOND)
