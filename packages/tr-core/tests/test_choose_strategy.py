"""Choose a strategy by the arguments, the launcher and the devices of the machine."""

import logging
from types import SimpleNamespace

import pytest
import torch

from tr_core import SingleDevice, Trainer, TrainingArguments, plugins
from tr_core import choose_strategy as xla_devices
from tr_core.choose_strategy import belongs_on_xla, choose_strategy, has_tpu, usable_strategy

ZERO = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("options", "processes", "name"),
    [
        ({}, 1, "single"),
        ({}, 2, "ddp"),
        ({"fsdp": "full_shard"}, 2, "fsdp"),
        ({"deepspeed": ZERO}, 2, "deepspeed"),
        ({"deepspeed": ZERO}, 1, "deepspeed"),
        ({"deepspeed": ZERO, "strategy": "deepspeed"}, 2, "deepspeed"),
        ({"strategy": "ddp"}, 1, "ddp"),
    ],
)
def test_arguments_and_launcher_decide(tmp_path, monkeypatch, options, processes, name):
    monkeypatch.setattr(plugins, "load", lambda group, asked: lambda args: (group, asked))
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **options)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert choose_strategy(args) == ("tr.strategies", name)


def test_matrices_that_a_given_strategy_does_not_divide_are_refused(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, parallelism_config="tp=2")
    with pytest.raises(ValueError, match="tp_size=2, and strategy='SingleDevice' has 1 process"):
        Trainer(torch.nn.Linear(1, 1), args, strategy=SingleDevice("cpu"))


@pytest.mark.parametrize(
    ("given", "has", "said"),
    [
        ("ep=2", {}, "has ep_size=2, and strategy='Given' has ep_size=1; leave it out"),
        ("ep=2", {"ep_size": 4}, "has ep_size=2, and strategy='Given' has ep_size=4"),
        ("tp=2,sp=3", {"sp_size": 6}, "has sp_size=3 x tp_size=2, and strategy='Given' has sp_size=6 x tp_size=1"),
    ],
)
def test_a_given_strategy_that_has_other_sizes_is_refused(tmp_path, given, has, said):
    class Given(SingleDevice):
        sizes = has
        data = SimpleNamespace(world_size=1, rank=0)
        world_size = 6 if "sp" in given else 1

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, parallelism_config=given)
    with pytest.raises(ValueError, match=said):
        usable_strategy(args, Given("cpu"))


def test_sizes_are_those_of_the_strategy(tmp_path):
    class Given(SingleDevice):
        sizes = {"sp_size": 2, "tp_size": 4, "ep_size": 8}

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, parallelism_config="ep=8")
    trainer = Trainer(torch.nn.Linear(1, 1), args, strategy=Given("cpu"))
    assert (trainer.get_tp_size(), trainer.get_sp_size(), trainer.get_cp_size()) == (4, 2, 1)


# The launcher


@pytest.fixture
def simple_launch(monkeypatch):
    """As `accelerate launch --num_processes 2` starts one process without GPUs."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)


def test_one_process_instead_of_several_is_refused(simple_launch, tmp_path):
    with pytest.raises(ValueError, match="asked for several processes .* started one"):
        Trainer(torch.nn.Linear(1, 1), TrainingArguments(str(tmp_path)))


def test_one_process_that_was_asked_for_is_none_too_few(simple_launch, monkeypatch, tmp_path):
    monkeypatch.delenv("MASTER_PORT")
    assert Trainer(torch.nn.Linear(1, 1), TrainingArguments(str(tmp_path))).strategy.world_size == 1


def test_what_the_launcher_set_is_said(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(logging.getLogger("tr_core"), "propagate", True)
    with caplog.at_level(logging.INFO, "tr_core.choose_strategy"):  # whatever level an earlier Trainer has set
        Trainer(torch.nn.Linear(1, 1), TrainingArguments(str(tmp_path), use_cpu=True))
    assert "bf16=True (ACCELERATE_MIXED_PRECISION)" in caplog.text


def test_processes_of_srun_are_not_trained_as_unrelated_ones(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PROCID": "1", "LOCALID": "1", "STEP_NUM_TASKS": "2", "TASKS_PER_NODE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    args = TrainingArguments(str(tmp_path), strategy="single")
    assert (args.process_index, args.local_process_index, args.world_size) == (1, 1, 2)
    with pytest.raises(ValueError, match="strategy='single' in one of 2 processes"):
        Trainer(torch.nn.Linear(1, 1), args)


# XLA devices


def arguments(**given):
    values = {"use_cpu": False, "fsdp_config": {}, "fsdp": [], "deepspeed": None, "strategy": "auto"}
    values |= {"parallelism_config": None, "elastic": None}
    return SimpleNamespace(**{**values, **given})


@pytest.fixture
def devices(tmp_path):
    def add(number, vendor, device):
        folder = tmp_path / number
        folder.mkdir()
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")
        return tmp_path

    add("0000:00:01.0", "0x8086", "0x0027")
    add("0000:00:02.0", "0x1ae0", "0x0042")  # a network card of the same maker
    add.folder = tmp_path
    return add


@pytest.fixture
def torch_xla(monkeypatch):
    monkeypatch.setattr(xla_devices, "find_spec", lambda name: object() if name == "torch_xla" else None)


def test_a_tpu_is_known_by_its_numbers(devices):
    assert not has_tpu(devices.folder)
    assert has_tpu(devices("0000:00:03.0", "0x1ae0", "0x0063"))


def test_being_importable_is_not_enough(devices, torch_xla):
    assert not belongs_on_xla(arguments(), {}, devices.folder)


def test_a_named_device_or_a_tpu_is_enough(devices, torch_xla):
    assert belongs_on_xla(arguments(), {"PJRT_DEVICE": "CPU"}, devices.folder)
    assert belongs_on_xla(arguments(), {}, devices("0000:00:03.0", "0x1ae0", "0x005e"))


@pytest.mark.parametrize("value", ["0", "false", "NO", "off"])
def test_it_can_be_switched_off(devices, torch_xla, value):
    environ = {"PJRT_DEVICE": "TPU", "USE_TORCH_XLA": value}
    assert not belongs_on_xla(arguments(), environ, devices.folder)
    assert not belongs_on_xla(arguments(use_cpu=True), {"PJRT_DEVICE": "TPU"}, devices.folder)


def test_without_the_package_a_named_device_is_nothing(devices, monkeypatch):
    monkeypatch.setattr(xla_devices, "find_spec", lambda name: None)
    assert not belongs_on_xla(arguments(), {"PJRT_DEVICE": "TPU"}, devices.folder)


def test_the_configuration_may_ask_for_it(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "tr_core.choose_strategy.plugins.load", lambda group, name: asked.append(name) or (lambda args: name)
    )
    config = {"xla": True}
    assert choose_strategy(arguments(fsdp=["full_shard"], fsdp_config=config)) == "xla"
    assert choose_strategy(arguments(fsdp=["full_shard"])) == "fsdp"
    assert choose_strategy(arguments(deepspeed={"a": 1}, fsdp_config=config)) == "deepspeed"
    assert asked == ["xla", "fsdp", "deepspeed"]
