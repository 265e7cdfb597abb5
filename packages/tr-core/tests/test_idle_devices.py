"""A process uses one device, and says so where there are more."""

import logging

import pytest
import torch

from tr_core import Trainer, TrainingArguments
from tr_core.single_device import warn_of_idle_devices


@pytest.fixture
def four(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)


def test_several_devices_of_which_one_is_used_are_told_once(four, caplog):
    with caplog.at_level(logging.WARNING, "tr_core.single_device"):  # whatever level an earlier Trainer has set
        for _ in range(2):
            warn_of_idle_devices(torch.device("cuda", 0))
    (said,) = caplog.messages
    assert said.startswith("4 cuda devices are visible, and one process uses one, cuda:0; to use all")
    assert "trainer launch --nproc 4 SCRIPT, or torchrun --nproc-per-node 4 SCRIPT" in said


def test_a_run_on_the_cpu_says_nothing_of_devices_and_is_never_wrapped(four, caplog, tmp_path):
    model = torch.nn.Linear(2, 1)
    trainer = Trainer(model, TrainingArguments(output_dir=str(tmp_path), use_cpu=True))
    assert "devices are visible" not in caplog.text
    assert trainer.model_wrapped is model
    assert trainer.args.n_gpu == 0


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_several_devices_do_not_become_data_parallel(tmp_path, caplog):
    trainer = Trainer(torch.nn.Linear(2, 1), TrainingArguments(output_dir=str(tmp_path)))
    assert not isinstance(trainer.model_wrapped, torch.nn.DataParallel)
    assert trainer.args.n_gpu == 1
    assert "one process uses one, cuda:0" in caplog.text
