"""What the launcher decided is said, and a launch that started too few processes is refused."""

import logging

import pytest
import torch

from tr_core import Trainer, TrainingArguments


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
