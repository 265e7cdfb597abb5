"""Ray Train runs the Trainer on two workers, and starts them again after one has failed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train")
SCRIPT = Path(__file__).parents[2] / "packages/tr-all/examples/ray_train/ray_train.py"


def run(folder, *words):
    """Run the example, and return its test metrics and what it printed."""
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
    environment["RAY_TMPDIR"] = "/tmp"  # a socket's path is short
    command = [sys.executable, str(SCRIPT), "--storage_path", str(folder), "--num_train_epochs", "1", *words]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=400)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return json.loads((folder / "trainer/test_results.json").read_text()), said


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


def test_two_workers_train_one_model(whole):
    results, said = whole
    assert "device     cpu x 2" in said
    assert results["eval_accuracy"] > 0.8
    reported = re.findall(r"Reporting training result \d+: .*'step': (\d+).* from rank (\d)", said)
    assert {("50", "0"), ("50", "1"), ("100", "0"), ("100", "1")} <= set(reported)


def test_workers_that_are_started_again_end_as_if_none_had_failed(whole, tmp_path):
    results, said = run(tmp_path, "--fail_at", "120")
    assert "this worker was asked to fail at step 120" in said
    assert "resuming at step 100 of 141" in said
    assert results["eval_loss"] == whole[0]["eval_loss"]
    assert results["eval_accuracy"] == whole[0]["eval_accuracy"]
