from types import SimpleNamespace

import pytest
import torch

from tr_dist import doctor, machine


def test_doctor_prints_what_there_is_and_finds_no_problem(capsys):
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert "cpu: computes" in printed
    assert "gloo: in this torch" in printed
    assert f"torch {torch.__version__}" in printed
    assert "no launcher: a training run started here is one process" in printed
    assert printed.endswith("no problems found\n")


def test_doctor_shows_who_this_process_is(capsys, monkeypatch):
    given = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert "CUDA_VISIBLE_DEVICES=''" in printed
    assert "environment: rank 1 of 2, local rank 1, meeting at localhost:29500, restart 0" in printed


def test_doctor_names_every_problem_of_the_environment(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "problems\n  WORLD_SIZE not set beside RANK=0" in printed


def test_doctor_names_too_few_devices(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert doctor.main([]) == 1
    assert "LOCAL_RANK=0 has no CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sizes", "here", "said"),
    [
        ("tp=4,dp_shard=4", 8, "  4 processes in a row compute a sample together: they are on one machine, of 8"),
        (
            "tp_size=2,sp=3",
            8,
            "  warning: 6 processes in a row (cp_size, sp_size, tp_size) exchange in every layer, and a mac",
        ),
        ("cp=3,tp=2", 8, "  warning: 6 processes in a row"),
        ("tp=16", 8, "some of them are on two machines, whose network is slower; choose sizes whose product divides 8"),
    ],
)
def test_doctor_warns_where_neighbours_are_on_two_machines(capsys, monkeypatch, sizes, here, said):
    given = {"RANK": 0, "WORLD_SIZE": 48, "LOCAL_RANK": 0, "MASTER_ADDR": "localhost", "MASTER_PORT": 29500}
    for name, value in {**given, "LOCAL_WORLD_SIZE": here}.items():
        monkeypatch.setenv(name, str(value))
    assert doctor.main(["--parallelism_config", sizes]) == 0
    assert said in capsys.readouterr().out


def test_doctor_refuses_sizes_that_are_none(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--parallelism_config", "tp=x"])
    assert "--parallelism_config 'tp=x' is not understood; give it as in tp=2,dp_shard=4" in capsys.readouterr().err


def test_doctor_explains_itself(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--help"])
    assert "communication backends" in capsys.readouterr().out


@pytest.fixture
def mac(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(machine, "_computes", lambda device, problems: "computes")


@pytest.mark.parametrize(("value", "shown"), [(None, "not set"), ("1", "1")])
def test_doctor_shows_a_macs_device_and_whether_missing_operations_go_to_the_cpu(
    capsys, monkeypatch, mac, value, shown
):
    if value is None:
        monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK", raising=False)
    else:
        monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", value)
    assert doctor.main([]) == 0
    printed = capsys.readouterr().out
    assert "mps: computes" in printed
    assert f"PYTORCH_ENABLE_MPS_FALLBACK: {shown} (1 computes on the CPU what MPS has not" in printed
    assert "this process would compute on mps" in printed


def test_doctor_finds_that_several_processes_cannot_train_on_a_mac(capsys, monkeypatch, mac):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "TR_RENDEZVOUS_FILE": "x"}.items():
        monkeypatch.setenv(name, value)
    assert doctor.main([]) == 1
    assert "rank 1 of 2 cannot compute on this machine's mps device: neither gloo nor nccl" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("listed", "problem"), [("2,0", ""), ("2,0,-1,1", ""), ("2,0,7", "2 visible; CUDA ends the list")]
)
def test_doctor_shows_which_gpu_is_which_device_and_a_list_that_ends_early(capsys, monkeypatch, listed, problem):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    facts = {"name": "A100", "total_memory": 2**36, "major": 8, "minor": 0}
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**facts, uuid=f"{index}{index}-ab")
    )
    monkeypatch.setattr(machine, "_computes", lambda device, problems: "computes")
    assert doctor.main([]) == bool(problem)
    printed = capsys.readouterr().out
    assert f"CUDA_VISIBLE_DEVICES={listed!r}" in printed
    assert "cuda:1: A100 (UUID 11-ab, as nvidia-smi -L lists it), 64.0 GiB, compute capability 8.0, computes" in printed
    assert problem in printed
