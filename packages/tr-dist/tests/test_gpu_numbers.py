"""Which GPU of the machine is which CUDA device: as CUDA's variables say, and as the seeds' examples promise."""

import os
from itertools import product

import pytest
import torch
from fake_smi import A100, T4, install, machine

from tr_dist import doctor
from tr_dist.gpus import SmiError, number_gpus, read_physical_gpus

MIG = """
GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-00000000-ab)
  MIG 3g.40gb     Device  0: (UUID: MIG-c7384736-a75d)
  MIG 3g.40gb     Device  1: (UUID: MIG-a28ad590-3fda)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-11111111-ab)
"""


@pytest.fixture
def four(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, A100, A100, A100, A100)
    return read_physical_gpus()


def numbers(gpus, listed, order=None):
    given = {"CUDA_VISIBLE_DEVICES": listed, "CUDA_DEVICE_ORDER": order}
    found = number_gpus(gpus, {name: value for name, value in given.items() if value is not None})
    return [gpu and gpu.index for gpu in found.devices], found


def test_gpus_are_listed_as_nvidia_smi_numbers_them(four):
    assert [gpu.index for gpu in four] == [0, 1, 2, 3]
    assert (four[2].uuid, four[2].name, four[2].bus_id) == ("GPU-22222222-ab", A100, "00000000:17:00.0")


@pytest.mark.parametrize(
    ("listed", "order", "expected"),
    [
        ("0,2", None, [0, 2]),  # physical 0 and 2 are cuda:0 and cuda:1
        ("2,0", None, [2, 0]),  # physical 0 and 2 are cuda:1 and cuda:0
        ("", None, []),  # an environment without GPUs
        (None, "PCI_BUS_ID", [0, 1, 2, 3]),  # the order of nvidia-smi
        (None, "FASTEST_FIRST", [0, 1, 2, 3]),  # all are equally fast
        ("1,0", None, [1, 0]),  # exchanged without opening the machine
    ],
)
def test_the_examples_of_the_seeds(four, listed, order, expected):
    found, numbering = numbers(four, listed, order)
    assert found == expected
    assert numbering.problems == ()


@pytest.mark.parametrize(
    ("listed", "expected", "said"),
    [
        (
            "0,7,1",
            [0],
            "'7' is no GPU of this machine, which has 4; the list ends there, so '1' behind it is hidden too",
        ),
        ("0,x,1", [0], "'x' is not the number of a GPU; the list ends there"),
        ("7", [], "'7' is no GPU of this machine, which has 4; the list ends there, and no GPU is visible"),
        ("1,2,1", [], "lists '1' twice, and CUDA then shows no device"),
        ("0,GPU-1", [0], "'GPU-1' is not the number of a GPU"),
        ("GPU-1,2", [1], "'2' does not begin with 'GPU-', as the first entry does"),
        ("GPU-3,GPU-9", [3], "'GPU-9' is no device of this machine"),
        ("GPU-", [], "'GPU-' fits 4 devices"),
        ("GPU-1,GPU-11", [], "lists 'GPU-11' twice"),
        ("MIG-1", [], "'MIG-1' is no device of this machine"),
    ],
)
def test_where_a_list_ends_is_said(four, listed, expected, said):
    found, numbering = numbers(four, listed)
    assert found == expected
    assert said in " ".join(numbering.problems)


@pytest.mark.parametrize(("listed", "expected"), [("-1", []), ("0,2,-1,1", [0, 2]), ("NoDevFiles", [])])
def test_a_list_that_is_ended_on_purpose_is_no_problem(four, listed, expected):
    found, numbering = numbers(four, listed)
    assert (found, numbering.problems) == (expected, ())
    assert "the list ends there" in " ".join(numbering.why)


def test_numbers_and_uuids_may_be_written_as_cuda_reads_them(four):
    assert numbers(four, " 1gpu, +2")[0] == [1, 2]
    assert numbers(four, "GPU-3,GPU-00000000-ab")[0] == [3, 0]


def test_lists_are_read_as_torch_reads_them(four, monkeypatch):
    """torch reads the variable itself, to count devices without waking the driver."""
    words = ["0", "2", " 3", "-1", "", "x", "2x", "9", "GPU-1", "GPU-22222222-ab", "GPU-", "+1"]
    for entries in [*product(words, repeat=1), *product(words, repeat=2), *product(words[:5], repeat=3)]:
        listed = ",".join(entries)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        read = torch.cuda._parse_visible_devices()
        if read and isinstance(read[0], str):
            read = torch.cuda._transform_uuid_to_ordinals(read, [gpu.uuid for gpu in four])
        usable = next((i for i, number in enumerate(read) if number >= len(four)), len(read))
        assert numbers(four, listed)[0] == read[:usable], listed


def test_unlike_gpus_are_numbered_by_speed_unless_the_bus_is_asked_for(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, T4, A100)
    gpus = read_physical_gpus()
    for order in (None, "FASTEST_FIRST"):
        found, numbering = numbers(gpus, "1,0", order)
        assert found == [None, None]
        assert "may not be nvidia-smi's order; set CUDA_DEVICE_ORDER=PCI_BUS_ID" in numbering.why[0]
    assert numbers(gpus, "1,0", "PCI_BUS_ID")[0] == [1, 0]
    assert numbers(gpus, "GPU-1")[0] == [1]  # a name is a name in any order


def test_an_order_that_cuda_does_not_know_is_a_problem(four):
    found, numbering = numbers(four, None, "PCI")
    assert found == [0, 1, 2, 3]
    assert numbering.problems[0].startswith("CUDA_DEVICE_ORDER='PCI' is not known to CUDA; set one of FASTEST_FIRST")


@pytest.mark.parametrize("listed", ["MIG-a28ad590-3fda", "MIG-a28", "MIG-GPU-00000000-ab/2/0"])
def test_a_part_of_a_gpu_is_found_by_its_name(monkeypatch, tmp_path, listed):
    machine(monkeypatch, tmp_path, A100, A100, mig=MIG)
    assert numbers(read_physical_gpus(with_mig=True), listed)[0] == [0]


def test_a_process_uses_one_part_only(monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, A100, A100, mig=MIG)
    found, numbering = numbers(read_physical_gpus(with_mig=True), "MIG-a28,MIG-c73")
    assert found == [0]
    assert "a process uses one MIG device, the first" in numbering.problems[0]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no driver; exit 9", "nvidia-smi ended with exit code 9 and said: no driver"),
        ("echo lost >&2; exit 1", "said: lost"),
        ("exec sleep 60", "gave no answer within 0.2 s; a GPU or its driver hangs"),
        ("echo hello", "said 'hello', which is not an index"),
        ("echo 0, GPU-1", "said '0, GPU-1', which is not an index"),
    ],
)
def test_an_nvidia_smi_that_does_not_answer_is_named(monkeypatch, tmp_path, script, said):
    install(monkeypatch, tmp_path, script)
    with pytest.raises(SmiError, match=said):
        read_physical_gpus(timeout_s=0.2 if "sleep" in script else 20)


def test_an_nvidia_smi_that_may_not_be_started_is_named(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "echo")
    (tmp_path / "nvidia-smi").write_bytes(b"\x00")
    (tmp_path / "nvidia-smi").chmod(0o755)
    with pytest.raises(SmiError, match="cannot be started"):
        read_physical_gpus()


def test_a_machine_without_nvidia_smi_has_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_physical_gpus() == []


def examined(capsys, code=0):
    assert doctor.main([]) == code
    return capsys.readouterr().out


def test_doctor_shows_which_gpu_is_which_device_and_why(capsys, monkeypatch, four):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    printed = examined(capsys)
    assert "CUDA_DEVICE_ORDER is not set, which is FASTEST_FIRST: the GPUs are alike" in printed
    assert "CUDA_VISIBLE_DEVICES='2,0': 2 is cuda:0, 0 is cuda:1" in printed
    shown = [line.rpartition(": ")[2] for line in printed.splitlines() if line.startswith("  GPU ")]
    assert shown == ["cuda:1", "hidden", "cuda:0", "hidden"]


def test_doctor_shows_that_an_empty_list_is_the_cpu(capsys, monkeypatch, four):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    printed = examined(capsys)
    assert "CUDA_VISIBLE_DEVICES='' is empty: no GPU is visible, so training is on the CPU" in printed
    assert "this process would compute on cpu" in printed


def test_doctor_finds_a_list_that_ends_early(capsys, monkeypatch, four):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,7,1")
    assert "problems\n  CUDA_VISIBLE_DEVICES='0,7,1': '7' is no GPU of this machine" in examined(capsys, 1)


def test_doctor_says_that_a_number_cannot_be_told(capsys, monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, T4, A100)
    printed = examined(capsys)
    assert printed.count(": unknown") == 2


def test_doctor_finds_an_nvidia_smi_that_fails(capsys, monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "echo no driver; exit 9")
    assert "exit code 9 and said: no driver; repair the driver" in examined(capsys, 1)


def test_doctor_goes_by_what_torch_sees_where_it_sees_devices(capsys, monkeypatch, tmp_path):
    machine(monkeypatch, tmp_path, T4, A100)
    facts = type("Facts", (), {"name": A100, "total_memory": 2**36, "major": 8, "minor": 0, "uuid": "11111111-ab"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr("tr_dist.machine._computes", lambda device, problems: "computes")
    shown = [line.rpartition(": ")[2] for line in examined(capsys).splitlines() if line.startswith("  GPU ")]
    assert shown == ["hidden", "cuda:0"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_device_of_torch_is_a_gpu_of_nvidia_smi():
    """What the variables mean is what torch sees, on the machine this runs on."""
    devices = number_gpus(read_physical_gpus(), os.environ).devices
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    assert len(devices) == len(seen)
    for device, uuid in zip(devices, seen, strict=True):
        assert device is None or device.uuid.removeprefix("GPU-") == uuid
