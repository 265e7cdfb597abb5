"""Saving: when, which checkpoints stay, the best model, and the files that others read."""

import json

import parity_data as data
import parity_models as models
import pytest
import torch
import transformers
from parity_harness import OURS, REFERENCE, Scenario, assert_same, build, run, run_both, same_tensors, warnings_of
from safetensors.torch import load_file

EVALUATION = data.classes(9, seed=8)


def checkpoints(outcome):
    return sorted(path.name for path in outcome.folder.glob("checkpoint-*"))


BEST = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.3}


def test_the_step_of_the_best_evaluation_is_known_without_checkpoints_too(parity):
    reference, ours = parity(models.Mlp, data.classes(), EVALUATION, metric_for_best_model="loss", **BEST)
    assert ours.trainer.state.best_metric is not None
    assert ours.trainer.state.best_global_step is not None
    assert reference.trainer.state.best_global_step is None


@pytest.mark.parametrize("greater", [True, False])
@pytest.mark.parametrize("scores", [[1.0, 3.0, 2.0, 3.0, 4.0], [float("nan"), 3.0, 1.0, float("nan"), 2.0]])
def test_what_is_better_is_the_same(tmp_path, scores, greater):
    outcomes = []
    for side in (REFERENCE, OURS):
        coming = iter(scores)
        scenario = Scenario(
            models.Mlp,
            data.classes(),
            EVALUATION,
            {**BEST, "metric_for_best_model": "score", "greater_is_better": greater, "save_strategy": "best"},
            {"compute_metrics": lambda prediction, coming=coming: {"score": next(coming)}},
        )
        outcomes.append(run(side, scenario, tmp_path / side.name))
    reference, ours = outcomes
    assert checkpoints(ours) == checkpoints(reference)
    assert ours.trainer.state.best_metric == reference.trainer.state.best_metric
    assert ours.trainer.state.best_global_step == reference.trainer.state.best_global_step


@pytest.mark.parametrize("patience", [1, 2])
def test_early_stopping_is_the_same(tmp_path, patience):
    outcomes = []
    for side in (REFERENCE, OURS):
        scenario = Scenario(
            models.Mlp,
            data.classes(),
            EVALUATION,
            {**BEST, "eval_steps": 1, "num_train_epochs": 5, "metric_for_best_model": "loss"},
            callbacks=lambda side=side: [side.early_stopping(early_stopping_patience=patience)],
        )
        outcomes.append(run(side, scenario, tmp_path / side.name))
    assert_same(*outcomes)
    assert outcomes[1].trainer.state.global_step < 25


def test_the_weights_of_a_checkpoint_are_the_same_file_content(parity):
    reference, ours = parity(models.Mlp, data.classes(), save_strategy="steps", save_steps=4)
    for step in (4, 8, 10):
        files = [outcome.folder / f"checkpoint-{step}" / "model.safetensors" for outcome in (reference, ours)]
        assert same_tensors(load_file(files[0]), load_file(files[1]))


def test_the_state_file_has_the_same_entries(parity):
    reference, ours = parity(
        models.Mlp, data.classes(), EVALUATION, save_strategy="epoch", eval_strategy="epoch", logging_steps=3
    )
    states = [
        json.loads((outcome.folder / "checkpoint-10" / "trainer_state.json").read_text())
        for outcome in (reference, ours)
    ]
    # States of callbacks have a file of their own here: callbacks.json.
    assert set(states[0]) - set(states[1]) == {"stateful_callbacks"}
    assert set(states[1]) <= set(states[0])
    assert transformers.TrainerState(**states[1]).global_step == 10


@pytest.mark.parametrize("model", [models.bert_classifier, models.gpt2])
def test_a_saved_model_is_read_by_from_pretrained(tmp_path, model):
    samples = data.sentences() if model is models.bert_classifier else data.tokens()
    scenario = Scenario(model, samples, arguments={"max_steps": 2, "learning_rate": 0.01})
    reference, ours = run_both(scenario, tmp_path)
    loaded = []
    for outcome in (reference, ours):
        with warnings_of(REFERENCE):
            outcome.trainer.save_model(str(tmp_path / outcome.side.name / "saved"))
            loaded.append(type(outcome.trainer.model).from_pretrained(tmp_path / outcome.side.name / "saved"))
    assert same_tensors(loaded[0].state_dict(), loaded[1].state_dict())
    assert same_tensors(loaded[1].state_dict(), ours.weights)
    written = [load_file(tmp_path / side.name / "saved" / "model.safetensors") for side in (REFERENCE, OURS)]
    assert same_tensors(*written)


def test_result_files_are_the_same(tmp_path):
    contents = []
    for side in (REFERENCE, OURS):
        trainer = build(side, Scenario(models.Mlp), tmp_path / side.name).trainer
        trainer.save_metrics("train", {"train_loss": 0.5, "epoch": 2.0})
        trainer.save_metrics("eval", {"eval_loss": 0.25})
        trainer.save_metrics("test", {"test_loss": 0.1}, combined=False)
        contents.append(
            {path.name: json.loads(path.read_text()) for path in (tmp_path / side.name).glob("*_results.json")}
        )
    assert contents[1] == contents[0]
    assert set(contents[1]) == {"train_results.json", "eval_results.json", "test_results.json", "all_results.json"}


def test_a_checkpoint_of_ours_starts_a_run_of_the_reference(tmp_path):
    """Weights go over in either direction: the files have the same names and content."""
    scenario = Scenario(models.Mlp, data.classes(), arguments={"save_strategy": "epoch"})
    _, ours = run_both(scenario, tmp_path)
    model = models.Mlp()
    model.load_state_dict(load_file(ours.folder / "checkpoint-10" / "model.safetensors"))
    assert same_tensors(model.state_dict(), ours.weights)
    assert all(isinstance(value, torch.Tensor) for value in model.state_dict().values())
