"""A run has one output folder, wherever the process goes meanwhile and whatever the folder is called."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from shared.models import LinearClassifier

from tr_core import Trainer, TrainerCallback, TrainingArguments


class Samples:
    """Gives the same samples, and goes to a folder when one of them is asked for."""

    def __init__(self, folder=None):
        self.folder = folder
        generator = torch.Generator().manual_seed(0)
        self.rows = [{"x": torch.randn(3, generator=generator), "labels": torch.tensor(i % 2)} for i in range(32)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if self.folder is not None and index < 16:
            os.chdir(self.folder)
        return self.rows[index]


class Goes(TrainerCallback):
    """Goes to a folder at the end of the second step."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2 and self.folder is not None:
            os.chdir(self.folder)


def trainer_of(folder, *, callbacks=(), dataset=None, **options):
    args = TrainingArguments(
        folder,
        **{
            "max_steps": 6,
            "per_device_train_batch_size": 4,
            "save_steps": 2,
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "load_best_model_at_end": True,
            "report_to": ["jsonl"],
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        },
    )
    data = dataset or Samples()
    return Trainer(
        LinearClassifier(3, 2, seed=0), args, train_dataset=data, eval_dataset=Samples(), callbacks=list(callbacks)
    )


def finish(trainer, resume=None):
    result = trainer.train(resume_from_checkpoint=resume)
    trainer.save_metrics("train", result.metrics)
    trainer.save_model()
    trainer.save_state()
    return result


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Two folders; the process is in the first."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here", tmp_path / "there"


@pytest.mark.parametrize("where", ["before", "callback", "data"])
def test_all_files_of_a_run_are_in_the_folder_that_was_meant_when_it_began(places, where):
    here, there = places
    goes = [Goes(there)] if where == "callback" else []
    trainer = trainer_of("out", callbacks=goes, dataset=Samples(there if where == "data" else None))
    if where == "before":
        os.chdir(there)
    finish(trainer)
    assert Path.cwd() == there
    assert files_below(there) == []
    names = files_below(here)
    assert all(name.startswith("out/") for name in names)
    for name in (
        "checkpoint-6/manifest.json",
        "metrics.jsonl",
        "metrics-timed.jsonl",
        "model.safetensors",
        "trainer_state.json",
    ):
        assert f"out/{name}" in names
    again = trainer_of(str(here / "out"), max_steps=8)
    assert finish(again, resume=True).global_step == 8
    assert files_below(there) == []


def test_a_run_goes_on_in_its_folder_after_the_process_went_elsewhere(places):
    here, there = places
    trainer = trainer_of("out")
    finish(trainer)
    os.chdir(there)
    trainer.args.max_steps = 8
    assert finish(trainer, resume="auto").global_step == 8
    assert "out/checkpoint-8/manifest.json" in files_below(here)
    assert files_below(there) == []


def test_a_folder_assigned_between_runs_is_one_below_the_folder_of_that_time(places):
    here, there = places
    trainer = trainer_of("out")
    os.chdir(there)
    trainer.args.output_dir = "other"
    finish(trainer)
    assert files_below(here) == []
    assert all(name.startswith("other/") for name in files_below(there))
    assert trainer.args.output_dir == str(there / "other")


def test_the_arguments_are_written_as_they_were_given(places):
    here, _ = places
    trainer = trainer_of("out", logging_dir="logs")
    assert (trainer.args.output_dir, trainer.args.logging_dir) == (str(here / "out"), str(here / "logs"))
    written = json.loads(trainer.args.to_json_string())
    assert (written["output_dir"], written["logging_dir"]) == ("out", "logs")
    assert trainer.args.origin("output_dir") == "call"
    trainer.args.output_dir = "other"
    assert trainer.args.to_dict()["output_dir"] == "other"
    address = trainer_of("out", logging_dir="gs://bucket/logs").args
    assert address.logging_dir == "gs://bucket/logs"


NAMES = {
    "line break": "out\nput",
    "format": "out-%s-{0}-{name}",
    "dash": "-out",
    "space": " out ",
    "escape": "out\x1b[2J",
    "quotes": "o'u\"t",
    "dots": "...",
    "long": "o" * 200,
}


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems take no such names")
@pytest.mark.parametrize("kind", NAMES)
def test_a_run_is_saved_and_resumed_in_a_folder_of_any_name(places, kind):
    trainer = trainer_of(NAMES[kind], push_to_hub=False)
    finish(trainer)
    assert finish(trainer_of(NAMES[kind], max_steps=8), resume=True).global_step == 8
    assert os.listdir(".") == [NAMES[kind]]


@pytest.mark.skipif(sys.platform != "linux", reason="the working directory can be removed there")
def test_a_relative_folder_below_a_working_directory_that_is_gone_is_refused(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match="working directory that does not exist any more"):
        trainer_of("out")
    os.chdir(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems take no such names")
def test_a_folder_whose_name_is_not_utf_8_is_refused_before_anything_is_trained(places):
    name = os.fsdecode(b"out-\xff")
    with pytest.raises(ValueError, match="needs a path that is UTF-8 text"):
        trainer_of(name)
    os.mkdir(name)
    os.chdir(name)
    with pytest.raises(ValueError, match="in the working directory it needs a path that is UTF-8 text"):
        trainer_of("out")
