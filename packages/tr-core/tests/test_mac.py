"""What is chosen and measured on a Mac, by asking alone."""

import pytest
import torch

from tr_core import SingleDevice, TrainingArguments, plugins
from tr_core.choose_strategy import choose_strategy
from tr_core.data.loaders import train_loader
from tr_core.optim.nonfinite import skips_on_device
from tr_core.runtime.memory import MemoryMeter
from tr_core.single_device import choose_device


@pytest.fixture
def mac(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major <= 14)


@pytest.fixture
def asked(monkeypatch):
    """Names of strategies that were asked for."""
    names = []
    monkeypatch.setattr(plugins, "load", lambda group, name: lambda args: names.append(name))
    return names


@pytest.mark.parametrize(
    ("installed", "use_cpu", "expected"), [(True, False, "mps"), (True, True, "single"), (False, False, "single")]
)
def test_a_macs_device_is_chosen_by_default(mac, asked, monkeypatch, tmp_path, installed, use_cpu, expected):
    monkeypatch.setattr(plugins, "available", lambda group: {"mps": "tr-dist"} if installed else {})
    choose_strategy(TrainingArguments(output_dir=str(tmp_path), use_cpu=use_cpu))
    assert asked == [expected]


def test_a_strategy_that_is_not_installed_is_named_with_its_package(installed, tmp_path):
    installed()
    with pytest.raises(plugins.PluginError, match="tr-dist"):
        choose_strategy(TrainingArguments(output_dir=str(tmp_path), strategy="mps"))


def test_the_former_switch_says_that_nothing_is_needed(tmp_path):
    with pytest.raises(ValueError, match="use_mps_device.*an Apple device is used where there is one, unless use_cpu"):
        TrainingArguments(output_dir=str(tmp_path), use_mps_device=True)


def test_one_device_without_the_strategy_trains_in_bfloat16_from_macos_14_and_never_in_float16(mac, monkeypatch):
    assert choose_device() == torch.device("mps")
    SingleDevice("mps", precision="bf16")
    with pytest.raises(ValueError, match="fp16=True on the mps device .*pip install tr-dist"):
        SingleDevice("mps", precision="fp16")
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    with pytest.raises(ValueError, match="bf16=True on the mps device needs macOS 14"):
        SingleDevice("mps", precision="bf16")


def test_memory_of_a_mac_has_no_peak(monkeypatch):
    held = iter([100, 250])
    monkeypatch.setattr(torch.mps, "current_allocated_memory", lambda: next(held))
    with MemoryMeter(torch.device("mps"), is_on=True).stage("train") as read:
        found = {name: value for name, value in read().items() if "_gpu_" in name}
    assert found == {"train_mem_gpu_alloc_delta": 150}


def test_memory_is_not_pinned_for_a_mac(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), dataloader_pin_memory=True)
    assert train_loader([1, 2], None, args, SingleDevice("mps"), "x").pin_memory is False


def test_a_flag_to_leave_out_an_update_is_read_on_a_mac():
    """Some versions of torch have fused optimizers there that do not look at it."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], fused=True)
    assert skips_on_device(optimizer)
    optimizer.param_groups[0]["params"] = [type("Elsewhere", (), {"is_mps": True})]
    assert not skips_on_device(optimizer)
