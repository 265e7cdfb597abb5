"""A run with a long log: a checkpoint holds its last entries and names the files of the earlier ones."""

import json

import pytest
import torch
from torch import nn

from tr_core import Trainer, TrainerCallback, TrainerState, TrainingArguments
from tr_core.checkpoint import log_files


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layer(x), labels)}


@pytest.fixture(autouse=True)
def few_entries(monkeypatch):
    monkeypatch.setattr(log_files, "ENTRIES", 10)


def trainer(folder, **arguments):
    torch.manual_seed(0)
    rows = [{"x": torch.randn(2), "labels": torch.randn(1)} for _ in range(64)]
    given = {"max_steps": 90, "logging_steps": 1, "save_steps": 30, "disable_tqdm": True, "report_to": []}
    args = TrainingArguments(str(folder), per_device_train_batch_size=1, use_cpu=True, **given | arguments)
    return Trainer(Model(), args, train_dataset=rows)


def losses(state):
    return [(entry["step"], entry["loss"]) for entry in state.log_history if "loss" in entry]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_resumed_run_has_the_whole_log_and_its_checkpoints_only_the_last_entries(tmp_path, asynchronous):
    alone = trainer(tmp_path / "alone", save_async=asynchronous)
    alone.train()
    for step in (30, 60, 90):
        folder = tmp_path / "alone" / f"checkpoint-{step}"
        held = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        assert [entry["step"] for entry in held] == list(range(step - 9, step + 1))
    again = trainer(tmp_path / "alone", save_async=asynchronous)
    again.train(resume_from_checkpoint=str(tmp_path / "alone" / "checkpoint-60"))
    assert losses(again.state) == losses(alone.state)
    assert [step for step, _ in losses(again.state)] == list(range(1, 91))


def test_the_file_of_a_checkpoint_says_where_the_other_entries_are_and_one_function_reads_all(tmp_path, caplog):
    whole = trainer(tmp_path)
    whole.train()
    path = tmp_path / "checkpoint-60" / "trainer_state.json"
    earlier = json.loads(path.read_text())["log_history_before"]
    assert earlier["entries"] == 50
    assert (path.parent / earlier["folder"] / earlier["last"]["name"]).is_file()
    state = TrainerState.load_from_json(path)
    assert losses(state) == losses(whole.state)[:60]
    (tmp_path / "log_history").rename(tmp_path / "gone")
    with caplog.at_level("WARNING", log_files.logger.name):
        assert losses(TrainerState.load_from_json(path)) == losses(whole.state)[50:60]
    assert "the first 50 of the logged entries are missing" in caplog.text


def test_an_entry_that_user_code_edits_later_is_in_the_next_checkpoint_and_after_a_resume(tmp_path):
    class Edit(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 60:
                state.log_history[4]["note"] = "outlier"

    whole = trainer(tmp_path)
    whole.add_callback(Edit())
    whole.train()
    again = trainer(tmp_path, max_steps=100)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-90"))
    assert again.state.log_history[4]["note"] == "outlier"


def test_what_is_saved_by_hand_holds_the_whole_log(tmp_path):
    whole = trainer(tmp_path)
    whole.train()
    whole.save_state()
    held = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert len(held) == len(whole.state.log_history) == 91


def test_a_checkpoint_of_the_model_only_holds_the_whole_log(tmp_path):
    trainer(tmp_path, save_only_model=True).train()
    held = json.loads((tmp_path / "checkpoint-90" / "trainer_state.json").read_text())["log_history"]
    assert len(held) == 90
