"""What `resume_from_checkpoint` takes, and what it says where there is nothing to take."""

import logging
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from changed_runs import Rates, build, resume, save
from shared.results import history


def test_true_without_a_valid_checkpoint_names_what_was_found(tmp_path):
    save(tmp_path, 4, save_steps=2)
    weights = tmp_path / "checkpoint-2" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for path in (tmp_path / "checkpoint-4").iterdir():
        path.unlink()
    (tmp_path / "checkpoint-4" / "weights.bin").write_bytes(b"of another program")
    with pytest.raises(ValueError, match="'auto' to start over where there is none") as error:
        build(tmp_path).train(resume_from_checkpoint=True)
    assert "skipped checkpoint-4: manifest.json is missing, so it is incomplete or was written by another" in str(
        error.value
    )
    assert "checkpoint-2: model.safetensors is 100 bytes short" in str(error.value)


def test_a_checkpoint_of_another_run_is_gone_on_from_and_left_as_it_is(tmp_path):
    save(tmp_path / "first", 6, save_steps=3)
    before = {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()}
    trainer = build(tmp_path / "second", save_steps=10)
    trainer.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-3"))
    assert trainer.state.global_step == 20
    assert sorted(path.name for path in (tmp_path / "second").glob("checkpoint-*")) == [
        "checkpoint-10",
        "checkpoint-20",
    ]
    # The folder of a run stands for its newest checkpoint.
    rates = Rates()
    build(tmp_path / "third", [rates]).train(resume_from_checkpoint=str(tmp_path / "first"))
    assert min(rates.used) == 6
    assert {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()} == before


def test_resume_of_a_finished_run_does_nothing(tmp_path):
    finished = build(tmp_path)
    finished.train()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = build(tmp_path)
    assert again.train(resume_from_checkpoint=True).global_step == finished.state.global_step == 20
    assert history(again) == history(finished)
    assert all(map(torch.equal, again.model.state_dict().values(), finished.model.state_dict().values()))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_folder_that_is_no_checkpoint_is_an_error_whatever_is_in_output_dir(tmp_path):
    save(tmp_path / "run", 2)
    with pytest.raises(ValueError, match="no checkpoint at .*nowhere: there is no such folder"):
        build(tmp_path / "run").train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_the_training_argument_is_honoured_and_the_argument_of_train_goes_before_it(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    save(tmp_path, 6, save_steps=3)
    trainer = build(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-3"), save_strategy="no")
    trainer.train()
    assert "resuming at step 3 of 20" in caplog.text
    trainer = build(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-3"), save_strategy="no")
    trainer.train(resume_from_checkpoint=True)
    assert "resuming at step 6 of 20" in caplog.text


def test_a_model_alone_is_not_gone_on_from_whatever_asks_for_it(tmp_path):
    save(tmp_path, 3, save_only_model=True)
    for resume_from in (True, "auto", str(tmp_path / "checkpoint-3")):
        with pytest.raises(ValueError, match="saved with the model only, and a run cannot resume from that"):
            build(tmp_path).train(resume_from_checkpoint=resume_from)


def test_another_model_is_refused_by_its_layers(tmp_path):
    class Wider(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = torch.nn.Linear(8, 32), torch.nn.Linear(32, 3)

    save(tmp_path, 3)
    with pytest.raises(ValueError, match="encoder.0.weight"):
        resume(tmp_path, network=Wider)
