"""Each tracker reached through accelerate keeps what a Trainer logs: by its real library, without a network."""

import json
import os
import sqlite3
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
TIME_LIMIT_S = 240
TOKEN = ("hf_", "kept", "to", "itself")  # in parts: some trackers keep the command line


def values_of_dvclive(folder):
    plots = folder / "out" / "dvclive" / "plots" / "metrics"
    rows = {name: (plots / name).with_suffix(".tsv").read_text().split() for name in ("train/loss", "eval/loss")}
    return [float(row) for name in rows for row in rows[name][3::2]]


def values_of_trackio(folder):
    [file] = (folder / "trackio").glob("*.db")
    with sqlite3.connect(file) as base:
        rows = [json.loads(row) for (row,) in base.execute("select metrics from metrics order by id")]
    return [row[name] for name in ("train/loss", "eval/loss") for row in rows if name in row]


def values_of_clearml(folder):
    [file] = (folder / "home").rglob("metrics.jsonl")
    events = [event for line in file.read_text().splitlines() for event in json.loads(line)]
    return [e["value"] for part in ("train", "eval") for e in events if (e["metric"], e["variant"]) == ("loss", part)]


def values_of_comet_ml(folder):
    [file] = (folder / "comet").glob("*.zip")
    with zipfile.ZipFile(file) as archive:
        messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    return [m["metricValue"] for name in ("train/loss", "eval/loss") for m in metrics if m["metricName"] == name]


def values_of_aim(folder):
    """Its files are of its own format, of which the names of metrics can be seen."""
    content = b"".join(file.read_bytes() for file in (folder / "out" / ".aim").rglob("*.sst"))
    for name in (b"train/loss", b"eval/loss"):
        assert name in content


def values_of_swanlab(folder):
    """Its file is of its own format: that it exists and names the metrics is what can be seen."""
    [file] = (folder / "swanlog").glob("run-*/run-*.swanlab")
    content = file.read_bytes()
    assert b"train/loss" in content
    assert b"eval/loss" in content


READ = {
    "aim": values_of_aim,
    "clearml": values_of_clearml,
    "comet_ml": values_of_comet_ml,
    "dvclive": values_of_dvclive,
    "swanlab": values_of_swanlab,
    "trackio": values_of_trackio,
}


@pytest.mark.parametrize("name", READ)
def test_a_tracker_keeps_what_the_trainer_logs(name, tmp_path):
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed; nox -s trackers installs it")
    (tmp_path / "home").mkdir()
    offline = {
        "HOME": str(tmp_path / "home"),
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_DIR": str(tmp_path / "swanlog"),
        "CLEARML_OFFLINE_MODE": "1",
        "COMET_START_ONLINE": "0",
        "COMET_OFFLINE_DIRECTORY": str(tmp_path / "comet"),
        "AIM_UI_TELEMETRY_ENABLED": "0",
        "DVC_NO_ANALYTICS": "1",
        "OMP_NUM_THREADS": "1",
    }
    work = tmp_path / "work"
    work.mkdir()
    script = Path(__file__).with_name("tracked_run.py")
    ended = subprocess.run(
        [sys.executable, str(script), name, str(tmp_path / "out"), *TOKEN],
        cwd=work, env={**os.environ, **offline}, capture_output=True, text=True, timeout=TIME_LIMIT_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    [said] = [line for line in ended.stdout.splitlines() if line.startswith("losses ")]
    expected = [float(word) for word in said.split()[1:]]
    assert len(expected) == 3
    assert "not recorded" not in ended.stderr
    values = READ[name](tmp_path)
    if values is not None:
        assert values == pytest.approx(expected, rel=1e-6)
    assert list(work.iterdir()) == [], "a tracker wrote into the working directory"
    token = "".join(TOKEN).encode()
    assert [file for file in tmp_path.rglob("*") if file.is_file() and token in file.read_bytes()] == []
