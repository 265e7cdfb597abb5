"""A Trainer that reports by transformers' callbacks, with the real libraries of trackers."""

import json
import sqlite3
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from transformers.integrations import INTEGRATION_TO_CALLBACK

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter_runs import STEPS, train, trainer_of

OURS = {"mlflow", "tensorboard", "wandb"}  # beside jsonl


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "0")


def logged_losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_every_name_of_transformers_is_ours_or_a_callback_of_transformers():
    offered = {entry.name: entry.value for entry in entry_points(group="tr.trackers")}
    assert set(INTEGRATION_TO_CALLBACK) <= set(offered)
    for name in INTEGRATION_TO_CALLBACK:
        assert (offered[name] == f"tr_log.transformers_trackers:{name}") == (name not in OURS), name


def test_dvclive_has_the_losses(tmp_path):
    trainer = train(tmp_path / "out", report_to=["dvclive"])
    lines = (tmp_path / "dvclive/plots/metrics/loss.tsv").read_text().splitlines()
    assert [float(line.split("\t")[1]) for line in lines[1:]] == pytest.approx(logged_losses(trainer))
    assert len(lines) == STEPS + 1


def test_trackio_has_the_losses_of_the_run_under_project_and_name(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    trainer = train(tmp_path / "out", report_to=["trackio"], project="mine", run_name="first")
    (database,) = tmp_path.rglob("mine.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_name, metrics from metrics order by step").fetchall()
    assert {name for name, _ in rows} == {"first"}
    found = [json.loads(metrics).get("train/loss") for _, metrics in rows]
    assert [loss for loss in found if loss is not None] == pytest.approx(logged_losses(trainer))


def test_codecarbon_writes_emissions_into_the_output_folder(tmp_path):
    train(tmp_path / "out", report_to=["codecarbon"])
    assert (tmp_path / "out" / "emissions.csv").read_text().count("\n") == 2


def test_several_trackers_of_both_kinds_report_side_by_side(tmp_path):
    trainer = train(tmp_path / "out", report_to=["dvclive", "jsonl"])
    assert (tmp_path / "dvclive/metrics.json").exists()
    assert len((tmp_path / "out/metrics-timed.jsonl").read_text().splitlines()) > len(logged_losses(trainer))


def test_a_wrong_name_suggests_trackers_only(tmp_path):
    with pytest.raises(ValueError, match="report_to='trakio': no tracker named 'trakio'.*trackio") as raised:
        trainer_of(tmp_path, report_to=["trakio"])
    assert "neftune" not in str(raised.value)
    assert ", hub (" not in str(raised.value)
