import logging
import os

import pytest
import torch
from fake_smi import A100, T4, machine

from tr_dist import LaunchEnvironment, rank_device
from tr_dist.environment import _log_idle_devices, lone_device
from tr_dist.gpus import number_gpus, read_physical_gpus
from tr_dist.launching.command import _parser, plan

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


@pytest.fixture
def four_gpus(monkeypatch):
    _log_idle_devices.cache_clear()
    _with_cuda_devices(monkeypatch, 4)
    yield
    _log_idle_devices.cache_clear()


def test_one_process_says_once_that_it_uses_one_of_several_devices(four_gpus, caplog):
    assert [rank_device(LaunchEnvironment()) for _ in range(2)] == [torch.device("cuda", 0)] * 2
    (said,) = caplog.messages
    assert said.startswith("4 CUDA devices are visible (CUDA_VISIBLE_DEVICES is not set), and this process uses one")
    assert "trainer launch --nproc 4 SCRIPT, or torchrun --nproc-per-node 4 SCRIPT" in said


def test_a_launched_rank_and_a_lone_device_say_nothing(four_gpus, monkeypatch, caplog):
    rank_device(SECOND)
    rank_device(LaunchEnvironment(), use_cpu=True)
    _with_cuda_devices(monkeypatch, 1)
    rank_device(LaunchEnvironment())
    assert caplog.records == []
    assert logging.getLogger("tr_dist.environment").isEnabledFor(logging.WARNING)


def _with_mps(monkeypatch):
    _with_cuda_devices(monkeypatch, 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


@pytest.mark.parametrize("environment", [SECOND, LaunchEnvironment()])
def test_ranks_on_an_apple_device_are_refused(monkeypatch, environment):
    _with_mps(monkeypatch)
    with pytest.raises(
        ValueError, match="neither gloo nor nccl carries its tensors, and there is one for all"
    ) as caught:
        rank_device(environment)
    assert "one process with strategy='mps', or in several with use_cpu=True" in str(caught.value)
    assert rank_device(environment, use_cpu=True) == torch.device("cpu")


def test_a_process_alone_takes_the_apple_device_unless_the_cpu_is_asked_for(monkeypatch):
    assert lone_device().type in ("cpu", "cuda")
    _with_mps(monkeypatch)
    assert lone_device() == torch.device("mps")
    assert lone_device(use_cpu=True) == torch.device("cpu")


def _launched(*words):
    return plan(_parser().parse_args([*words, __file__]))[0].variables


def test_devices_of_the_launcher_are_numbered_as_nvidia_smi_does(monkeypatch, tmp_path):
    """`--devices 1,0` is the second GPU and the first, also where CUDA itself would number the faster one first."""
    machine(monkeypatch, tmp_path, T4, A100)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    found = number_gpus(read_physical_gpus(), {**os.environ, **_launched("--devices", "1,0")})
    assert [gpu.name for gpu in found.devices] == [A100, T4]


@pytest.mark.parametrize(("name", "value"), [("CUDA_VISIBLE_DEVICES", "1,0"), ("CUDA_DEVICE_ORDER", "FASTEST_FIRST")])
def test_numbers_that_somebody_gave_before_keep_their_meaning(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert _launched("--devices", "1") == {"CUDA_VISIBLE_DEVICES": "1"}
