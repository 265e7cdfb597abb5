import logging
import os
from types import SimpleNamespace

import pytest
import torch

from tr_dist import LaunchEnvironment, rank_device, read_environment
from tr_dist.environment import _log_idle_devices, lone_device
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


OF_A_TASK = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "gpu[1-2]",
}  # fmt: skip
EXPORTED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("exported", [{}, EXPORTED], ids=["srun's variables", "exported by the script"])
@pytest.mark.parametrize(
    "declared",
    [
        {"SLURM_GPUS_PER_TASK": "1"},
        {"SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1"},
        {"SLURM_GPU_BIND": "verbose,single:1"},
        {"SLURM_GPU_BIND": "per_task:1"},
        {"SLURM_NTASKS_PER_GPU": "1"},
    ],
)
def test_a_task_that_srun_gave_a_device_of_its_own_takes_it(monkeypatch, declared, exported):
    environment = read_environment({**OF_A_TASK, **exported, **declared})
    assert environment.own_devices
    _with_cuda_devices(monkeypatch, 1)
    assert rank_device(environment) == torch.device("cuda", 0)
    _with_cuda_devices(monkeypatch, 2)
    assert rank_device(environment) == torch.device("cuda", 1)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_GPU_BIND": "single:2"},
        {"SLURM_NTASKS_PER_GPU": "2"},
        {"SLURM_TRES_PER_TASK": "cpu=4"},
        # torchrun, of which srun started one on each machine
        {**EXPORTED, "SLURM_GPUS_PER_TASK": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"},
    ],
)
def test_devices_that_tasks_may_share_are_not_taken_twice(monkeypatch, variables):
    environment = read_environment({**OF_A_TASK, **variables})
    assert not environment.own_devices
    _with_cuda_devices(monkeypatch, 1)
    with pytest.raises(ValueError, match=r"LOCAL_RANK=1 has no CUDA device: 1 visible here"):
        rank_device(environment)


@pytest.mark.parametrize("before", [None, "1"])
def test_deepspeed_is_told_the_device_and_the_launchers_rank_is_put_back(monkeypatch, before):
    deepspeed = pytest.importorskip("tr_dist.deepspeed.engine")
    monkeypatch.setattr(deepspeed, "_set_here", {})
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if before is not None:
        monkeypatch.setenv("LOCAL_RANK", before)
    deepspeed.set_local_rank(1, torch.device("cuda", 0))
    assert os.environ["LOCAL_RANK"] == "0"
    for name, value in {**EXPORTED, "RANK": "1"}.items():
        if name != "LOCAL_RANK":
            monkeypatch.setenv(name, value)
    if before is not None:
        assert deepspeed.read_launch_environment().local_rank == 1
    deepspeed.set_local_rank(1, torch.device("cpu"))
    assert os.environ["LOCAL_RANK"] == "1"
    monkeypatch.setattr(deepspeed.importlib, "import_module", lambda name: SimpleNamespace())
    deepspeed.reset_process_group()
    assert os.environ.get("LOCAL_RANK") == before


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


def test_devices_of_the_launcher_are_numbered_as_nvidia_smi_does(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    assert _launched("--devices", "1,0") == {"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(("name", "value"), [("CUDA_VISIBLE_DEVICES", "1,0"), ("CUDA_DEVICE_ORDER", "FASTEST_FIRST")])
def test_numbers_that_somebody_gave_before_keep_their_meaning(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert _launched("--devices", "1") == {"CUDA_VISIBLE_DEVICES": "1"}
