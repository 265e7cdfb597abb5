"""`trainer launch --dry_run`: what would be started is shown, and nothing is."""

import json

import pytest
import torch

from tr_dist.launching.command import main

SCRIPT = __file__


@pytest.fixture(autouse=True)
def _no_accelerator(monkeypatch):
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def shown(capsys, *words):
    assert main(["--dry_run", *words, SCRIPT, "--name", "two words"]) == 0
    return capsys.readouterr().out.splitlines()


def test_processes_variables_and_command_are_shown_and_nothing_is_started(capsys):
    assert shown(capsys, "--nproc", "2", "--max_restarts", "3", "--log_dir", "logs") == [
        "processes here  2",
        "machines        1",
        "variable        ACCELERATE_USE_CPU=true",
        "restarts        3",
        "output          logs/rank_N.log",
        f"command         python {SCRIPT} --name 'two words'",
    ]


def test_machines_show_where_they_meet(capsys):
    place = ("--nnodes", "1:4", "--rdzv_endpoint", "host:9", "--rdzv_id", "job")
    assert shown(capsys, *place)[1:3] == ["machines        1 to 4", "meeting at      host:9"]
    place = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "host", "--master_port", "9")
    assert shown(capsys, *place)[1:3] == ["machines        2, of which this is 1", "meeting at      host:9"]


def test_processes_without_an_accelerator_are_told_so_for_accelerates_own_scripts(capsys, monkeypatch):
    """Its Accelerator takes each of several processes on the CPU for a run of its own, unless it is told."""
    assert "variable        ACCELERATE_USE_CPU=true" in shown(capsys, "--nproc", "2")
    assert not any("variable" in line for line in shown(capsys, "--nproc", "1"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not any("variable" in line for line in shown(capsys, "--nproc", "2"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "false")
    assert not any("variable" in line for line in shown(capsys, "--nproc", "2"))


@pytest.mark.parametrize(
    ("kind", "count", "expected"),
    [
        ("NO", 1, "processes here  1"),
        ("MPS", 1, "processes here  1"),
        ("TPU", 1, "processes here  1"),
        ("MULTI_CPU", 2, "variable        ACCELERATE_USE_CPU=true"),
        ("MULTI_GPU", 2, "processes here  2"),
        ("FSDP", 2, "variable        ACCELERATE_USE_FSDP=true"),
        ("DEEPSPEED", 2, "variable        ACCELERATE_USE_DEEPSPEED=true"),
    ],
)
def test_each_kind_of_file_says_what_it_starts(kind, count, expected, tmp_path, capsys):
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"distributed_type": kind, "num_processes": count}))
    assert expected in shown(capsys, "--config_file", str(file))


@pytest.mark.parametrize("kind", ["MULTI_XPUS", "MEGATRON_LM"])
def test_a_kind_that_cannot_be_started_is_named_once(kind, tmp_path, capsys):
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"distributed_type": kind, "num_processes": 2}))
    assert main(["--dry_run", "--config_file", str(file), SCRIPT]) == 2
    assert capsys.readouterr().err.count(f"distributed_type: {kind} cannot be started here; it is one of NO") == 1
