"""What is accepted, built or written otherwise than by the reference, without any of it being a fault there."""

import json

import parity_data as data
import parity_models as models
import pytest
from parity_harness import OURS, REFERENCE, Scenario, build, run
from shared.commands import command

from tr_ckpt import CheckpointError

QUIET = {"logging_steps": 1, "num_train_epochs": 1, "disable_tqdm": True, "report_to": []}


def make(side, folder, **arguments):
    return build(side, Scenario(models.Mlp, data.classes(), data.classes(9, seed=8), arguments), folder).trainer


def test_the_best_checkpoint_without_a_metric_is_that_of_the_loss(tmp_path):
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best"}
    with pytest.raises(ValueError, match="metric_for_best_model` must be provided"):
        run(REFERENCE, Scenario(models.Mlp, data.classes(), data.classes(9, seed=8), arguments), tmp_path / "reference")
    trainer = make(OURS, tmp_path / "ours", **arguments)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.best_metric == min(losses)
    assert (trainer.args.metric_for_best_model, trainer.args.greater_is_better) == ("loss", False)


@pytest.mark.parametrize(
    ("value", "theirs", "mine"), [(3, 3, 3), ("3", None, 3), (1.0, None, 1), (True, True, None), (2.5, None, None)]
)
def test_steps_between_emptyings_of_the_cache_are_a_whole_number(tmp_path, value, theirs, mine):
    for side, expected in ((REFERENCE, theirs), (OURS, mine)):
        if expected is None:
            with pytest.raises(ValueError, match="torch_empty_cache_steps"):
                side.arguments(str(tmp_path), torch_empty_cache_steps=value)
        else:
            assert side.arguments(str(tmp_path), torch_empty_cache_steps=value).torch_empty_cache_steps is expected


def test_a_run_writes_its_log_into_the_output_folder(tmp_path):
    for side, names in ((REFERENCE, []), (OURS, ["events.jsonl", "metrics.jsonl", "report.html"])):
        make(side, tmp_path / side.name, save_strategy="no", **QUIET).train()
        assert [path.name for path in sorted((tmp_path / side.name).iterdir())] == names
    entries = (tmp_path / "ours" / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    assert len(entries) == 6  # five steps, and the sum


def test_a_checkpoint_that_was_changed_by_hand_is_for_the_command_to_accept(tmp_path, capsys):
    arguments = {**QUIET, "save_strategy": "steps", "save_steps": 2}
    for side in (REFERENCE, OURS):
        make(side, tmp_path / side.name, **arguments).train()
        folder = tmp_path / side.name / "checkpoint-2"
        path = folder / "trainer_state.json"
        state = json.loads(path.read_text(encoding="utf-8"))
        state["log_history"][0]["loss"] = 42.0
        path.write_text(json.dumps(state), encoding="utf-8")
        if side is OURS:
            with pytest.raises(CheckpointError, match=r"trainer_state.json is .* `trainer ckpt seal .*checkpoint-2`"):
                make(side, tmp_path / side.name, **arguments).train(resume_from_checkpoint=str(folder))
            assert command("ckpt")(["seal", str(folder), "--yes"]) == 0
        trainer = make(side, tmp_path / side.name, **arguments)
        trainer.train(resume_from_checkpoint=str(folder))
        assert trainer.state.log_history[0]["loss"] == 42.0
        assert trainer.state.global_step == 5
