"""`trainer init` writes scripts that run, learn and resume."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tr_all import init
from tr_all.cli import main
from tr_all.init import TEMPLATES

# What guessing comes to: 0.5, 0.33 and 0.53 of the classes, 0 of the variance, perplexity 26 by how frequent bytes are.
LEARNT = {
    "causal-lm": lambda results: results["eval_perplexity"] < 12,
    "custom": lambda results: results["eval_r2"] > 0.9,
    "image-classification": lambda results: results["eval_accuracy"] > 0.9,
    "text-classification": lambda results: results["eval_accuracy"] > 0.9,
    "token-classification": lambda results: results["eval_f1"] > 0.9,
}


EVERY_CHANGE = ("custom", "text-classification")


def run(folder, *words):
    """Train in `folder`; returns what was printed, and the results without times."""
    words = [sys.executable, "train.py", "--config", "train.yaml", *words]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((folder / "output/eval_results.json").read_text())
    return done.stdout + done.stderr, {key: results[key] for key in results if not re.search("time|per_second", key)}


def test_every_template_has_its_settings_and_its_bound():
    assert list(TEMPLATES) == sorted(LEARNT)
    assert all(path.with_suffix(".yaml").is_file() for path in TEMPLATES.values())


@pytest.mark.parametrize(
    "task", [task if task in EVERY_CHANGE else pytest.param(task, marks=pytest.mark.slow) for task in LEARNT]
)
def test_what_is_written_learns_and_a_resumed_run_ends_the_same(task, tmp_path, capsys):
    assert main(["init", task, str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"python {tmp_path}/train.py --config {tmp_path}/train.yaml --resume_from_checkpoint true" in shown
    _, results = run(tmp_path)
    assert LEARNT[task](results)
    *_, step, last = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("output/checkpoint-*"))
    shutil.rmtree(tmp_path / f"output/checkpoint-{last}")
    printed, again = run(tmp_path, "--resume_from_checkpoint", "true")
    assert f"resuming at step {step} of {last}" in printed
    assert again == results


def test_what_is_written_passes_the_check_before_a_run(tmp_path, capsys):
    assert main(["init", "text_classification", str(tmp_path)]) == 0
    words = ["-c", "from tr_all.cli import main; raise SystemExit(main())", "check", "--strict", "train.py"]
    done = subprocess.run(
        [sys.executable, *words, "--config", "train.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no problems found" in done.stdout


def refused(*words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["init", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_without_a_folder_it_writes_here(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "custom"]) == 0
    assert "python train.py --config train.yaml\n" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "train.yaml"}


def test_files_that_are_there_are_not_written_over(tmp_path, capsys):
    settings = tmp_path / "train.yaml"
    settings.write_text("mine")
    assert f"{settings} would be written over; give another folder" in refused("custom", str(tmp_path), capsys=capsys)
    assert settings.read_text() == "mine"
    assert not (tmp_path / "train.py").exists()


def test_an_unknown_task_is_refused_with_the_tasks_and_the_one_that_was_meant(tmp_path, capsys):
    shown = refused("text-clasification", str(tmp_path / "new"), capsys=capsys)
    assert f"unknown task 'text-clasification'; there are {', '.join(TEMPLATES)}" in shown
    assert "did you mean text-classification?" in shown
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    shown = refused("custom", str(tmp_path / "file/project"), capsys=capsys)
    assert f"{tmp_path / 'file/project'} cannot be written: " in shown
    assert "give another folder" in shown


def test_a_full_disk_leaves_nothing_behind(tmp_path, capsys, monkeypatch):
    def fails_for_the_settings(path, content):
        if path.suffix == ".yaml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(content)

    monkeypatch.setattr(init, "write_whole", fails_for_the_settings)
    assert f"{tmp_path} cannot be written: No space left" in refused("custom", str(tmp_path), capsys=capsys)
    assert list(tmp_path.iterdir()) == []


def test_the_help_lists_the_tasks_and_what_they_train(capsys):
    with pytest.raises(SystemExit):
        main(["init", "--help"])
    shown = capsys.readouterr().out
    assert all(re.search(rf"{task} +\w+", shown) for task in TEMPLATES)
