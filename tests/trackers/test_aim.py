"""Aim keeps what a Trainer logs: by its real library, without a network."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
TIME_LIMIT_S = 240
TOKEN = ("hf_", "kept", "to", "itself")  # in parts, so that no file has it by way of the command line


@pytest.mark.skipif(find_spec("aim") is None, reason="aim is not installed; nox -s trackers installs it")
def test_aim_keeps_what_the_trainer_logs(tmp_path):
    work, home = tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    script = Path(__file__).with_name("tracked_run.py")
    ended = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "out"), *TOKEN],
        cwd=work,
        env={**os.environ, "HOME": str(home), "AIM_UI_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr
    [said] = [line for line in ended.stdout.splitlines() if line.startswith("losses ")]
    assert len(said.split()) == 4
    assert "not recorded" not in ended.stderr
    # Its files are of a format of its own, of which the names of metrics can be seen.
    content = b"".join(file.read_bytes() for file in (tmp_path / "out" / ".aim").rglob("*.sst"))
    assert b"train/loss" in content
    assert b"eval/loss" in content
    assert list(work.iterdir()) == [], "Aim wrote into the working directory"
    token = "".join(TOKEN).encode()
    assert [file for file in tmp_path.rglob("*") if file.is_file() and token in file.read_bytes()] == []
