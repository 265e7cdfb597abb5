"""How busy the machine is, between two looks."""

import sys
import time
from types import SimpleNamespace

import pytest

from tr_log import machine_load
from tr_log.machine_load import MachineLoad


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs the files of Linux's kernel")
def test_a_busy_process_is_seen():
    load, end_s = MachineLoad(), time.perf_counter() + 0.3
    while time.perf_counter() < end_s:
        pass
    found = load.read()
    assert 0 < found["cpu_of_process"] <= 1.01
    assert 0 < found["cpu"] <= 1
    assert found["ram_bytes"] > 1e7
    assert "gpu" not in found
    assert load.read() == {}  # a moment later


def test_without_the_files_of_a_kernel_the_process_is_what_is_known(monkeypatch):
    monkeypatch.setattr(machine_load, "_numbers", lambda path: [])
    monkeypatch.setattr(machine_load, "SHORTEST_S", 0.0)
    assert [*MachineLoad().read()] == ["cpu_of_process"]


def test_a_gpu_is_asked_once_it_runs_and_not_again_if_it_does_not_tell(monkeypatch):
    asked = []

    def utilization():
        asked.append(1)
        if len(asked) > 1:
            raise ModuleNotFoundError("pynvml")
        return 40

    cuda = SimpleNamespace(is_initialized=lambda: True, utilization=utilization)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(machine_load, "SHORTEST_S", 0.0)
    load = MachineLoad()
    assert load.read()["gpu"] == 0.4
    assert all("gpu" not in load.read() for _ in range(2))
    assert len(asked) == 2
