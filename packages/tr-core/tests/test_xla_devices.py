"""When a run goes to an XLA device by itself: never because a package is installed."""

from types import SimpleNamespace

import pytest

from tr_core import choose_strategy as xla_devices
from tr_core.choose_strategy import belongs_on_xla, choose_strategy, has_tpu


def arguments(**given):
    values = {"use_cpu": False, "fsdp_config": {}, "fsdp": [], "deepspeed": None, "strategy": "auto"}
    values["parallelism_config"] = None
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
