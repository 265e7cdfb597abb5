"""Two Trainers, each in a process of its own, that save to one folder."""

import os
import subprocess
import sys

import pytest

# Arguments: folder, step in which to wait for a line on standard input, save_strategy.
PROGRAM = """
import sys
import torch
from torch import nn
from tr_ckpt.testing import give_owners
from tr_core import Trainer, TrainerCallback, TrainingArguments

give_owners(ending_s=0.5)
folder, wait_at, save_strategy, *_ = *sys.argv[1:], "steps"


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x):
        return {"loss": self.layer(x).square().mean()}


class Waiting(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == int(wait_at):
            print("waits", flush=True)
            sys.stdin.readline()


args = TrainingArguments(
    folder, max_steps=4, save_strategy=save_strategy, save_steps=1, logging_strategy="no", use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(Network(), args, train_dataset=[{"x": torch.ones(2)}] * 32, callbacks=[Waiting()])
trainer.train(resume_from_checkpoint="auto")
print("complete", trainer.state.global_step, flush=True)
"""


def begin(*arguments):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.fixture
def first(tmp_path):
    """A run that waits in its third step."""
    run = begin(tmp_path, 2)
    assert run.stdout.readline() == "waits\n"
    yield run
    run.kill()
    run.communicate()


def listed(folder):
    written_alongside = ("metrics.jsonl", "events.jsonl", "report.html")
    return sorted(name for name in os.listdir(folder) if name not in written_alongside)


def test_a_second_run_is_refused_before_it_trains(first, tmp_path):
    output, errors = begin(tmp_path, -1).communicate(timeout=240)
    assert "complete" not in output
    assert f"FolderInUseError: {tmp_path} is in use: process {first.pid} on " in errors
    assert "give this one a folder of its own (output_dir), wait for the other, or end it" in errors
    assert "training Network" not in errors
    output, errors = begin(tmp_path, -1, "no").communicate(timeout=240)  # one without checkpoints is not
    assert output.endswith("complete 4\n"), errors
    assert listed(tmp_path) == [".run-lock.json", "checkpoint-1", "checkpoint-2"]
    output, errors = first.communicate("\n", timeout=240)
    assert output.endswith("complete 4\n"), errors
    assert listed(tmp_path) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]


def test_after_a_kill_the_next_run_takes_over_at_once(first, tmp_path):
    first.kill()
    first.wait(60)
    assert ".run-lock.json" in listed(tmp_path)
    output, errors = begin(tmp_path, -1).communicate(timeout=240)
    assert output.endswith("complete 4\n"), errors
    assert f"was left locked by process {first.pid} on" in errors
    assert "waiting up to" not in errors
    assert "resuming at step 2 of 4" in errors
    assert listed(tmp_path) == [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
