"""The example of a loop written by hand, which is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import custom_loop
import pytest
import torch
from digit_batches import rows_of_step
from safetensors.torch import load_file

from tr_args import ArgumentsError

SCRIPT = Path(custom_loop.__file__)
WORDS = ["--steps", "80", "--save_steps", "10", "--log_steps", "5", "--batch_size", "8"]


@pytest.fixture
def command(digits):
    """Return the script's command and its environment."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment = {**inherited, "PYTHONPATH": str(digits), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def command(*words, launcher=()):
        return {"args": [sys.executable, *launcher, str(SCRIPT), *WORDS, *words], "env": environment}

    return command


def finish(command):
    done = subprocess.run(**command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_killed_in_the_middle_and_started_again_it_ends_with_the_same_bits(command, tmp_path):
    finish(command("--output_dir", str(tmp_path / "whole")))
    killed = tmp_path / "killed"
    process = subprocess.Popen(**command("--output_dir", str(killed)), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (killed / "checkpoint-20").is_dir() and time.monotonic() < deadline:
        time.sleep(0.001)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert not (killed / "model.safetensors").exists()  # it had not come to its end

    said = finish(command("--output_dir", str(killed)))
    assert "going on from step " in said
    whole = tmp_path / "whole"
    for name in ("model.safetensors", "all_results.json", "metrics.jsonl", "checkpoint-80/optimizer.safetensors"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    assert json.loads((whole / "all_results.json").read_text())["test_accuracy"] > 0.9


@pytest.mark.slow
@pytest.mark.launcher
def test_two_processes_train_the_same_model_as_one(command, tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    finish(command("--dropout", "0", "--steps", "20", "--output_dir", str(tmp_path / "one")))
    finish(command("--dropout", "0", "--steps", "20", "--output_dir", str(tmp_path / "two"), launcher=launcher))
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-4)
    one, two = ((tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("one", "two"))
    assert [json.loads(line)["loss"] for line in two] == pytest.approx([json.loads(line)["loss"] for line in one], 1e-3)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--save_steps", "7", "--log_steps", "5"], "save_steps=7 must be a multiple of log_steps=5"),
        (["--stepps", "5"], "did you mean --steps"),
    ],
)
def test_what_cannot_be_done_is_refused(words, message):
    with pytest.raises(ArgumentsError, match=message):
        custom_loop.main(words)


def test_a_batch_that_cannot_be_shared_out_is_refused(digits, tmp_path):
    with pytest.raises(ValueError, match="batch_size=9 cannot be shared out among 1 processes with 2 micro-batches"):
        custom_loop.main(["--batch_size", "9", "--output_dir", str(tmp_path)])


def test_each_pass_uses_each_sample_once_in_an_order_of_its_own():
    passes = [torch.cat([rows_of_step(step, 5, 20, seed=3) for step in range(4 * n, 4 * n + 4)]) for n in (0, 1)]
    assert all(sorted(rows.tolist()) == list(range(20)) for rows in passes)
    assert not torch.equal(*passes)
    assert torch.equal(rows_of_step(6, 5, 20, seed=3), passes[1][10:15])
