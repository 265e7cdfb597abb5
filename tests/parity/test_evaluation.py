"""Evaluation and prediction: when, on what, and what comes out."""

import numpy as np
import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, assert_same_metrics, build, warnings_of, without_times


def accuracy(prediction):
    logits, labels = prediction
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"accuracy": (logits.argmax(-1) == labels).mean(), "rows": len(labels)}


EVALUATION = data.classes(9, seed=8)
WITH_METRICS = {"compute_metrics": accuracy}


def both(tmp_path, scenario):
    """Build both trainers for evaluation alone."""
    return [build(side, scenario, tmp_path / side.name) for side in (REFERENCE, OURS)]


def predictions_of(outcomes, samples, **how):
    results = []
    for outcome in outcomes:
        with warnings_of(outcome.side):
            results.append(outcome.trainer.predict(samples, **how))
    return results


def assert_same_prediction(reference, ours):
    assert_same_arrays(reference.predictions, ours.predictions)
    assert_same_arrays(reference.label_ids, ours.label_ids)
    assert_same_metrics(without_times(reference.metrics), without_times(ours.metrics))


def assert_same_arrays(expected, given):
    assert type(given) is type(expected)
    if isinstance(expected, tuple | list):
        assert len(given) == len(expected)
        for one, other in zip(expected, given, strict=True):
            assert_same_arrays(one, other)
    elif isinstance(expected, dict):
        assert given.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_arrays(value, given[key])
    elif isinstance(expected, np.ndarray):
        assert (given.dtype, given.shape) == (expected.dtype, expected.shape)
        assert (given == expected).all()
    else:
        assert given == expected


@pytest.mark.parametrize("model", [models.Mlp, models.TupleMlp])
def test_predictions_are_the_same(tmp_path, model):
    outcomes = both(tmp_path, Scenario(model, options=WITH_METRICS))
    assert_same_prediction(*predictions_of(outcomes, EVALUATION))


def test_predictions_without_labels_are_the_same(tmp_path):
    outcomes = both(tmp_path, Scenario(models.Mlp, options=WITH_METRICS))
    unlabelled = data.Samples([{"x": sample["x"]} for sample in EVALUATION.samples])
    reference, ours = predictions_of(outcomes, unlabelled)
    assert_same_prediction(reference, ours)
    assert ours.label_ids is None


def test_predictions_of_different_lengths_are_padded_the_same(tmp_path):
    scenario = Scenario(
        models.llama, arguments={"per_device_eval_batch_size": 2}, options={"data_collator": data.pad_tokens}
    )
    reference, ours = predictions_of(both(tmp_path, scenario), data.ragged_tokens())
    assert_same_arrays(reference.predictions, ours.predictions)
    assert_same_arrays(reference.label_ids, ours.label_ids)
    assert (ours.predictions == -100).any()


def test_a_prefix_of_the_metrics_is_the_same(tmp_path):
    outcomes = both(tmp_path, Scenario(models.Mlp, options=WITH_METRICS))
    reference, ours = predictions_of(outcomes, EVALUATION, metric_key_prefix="held_out")
    assert_same_prediction(reference, ours)
    assert "held_out_accuracy" in ours.metrics


@pytest.mark.parametrize("ignored", [None, [], ["hidden_states"], ["logits"], ["logits", "hidden_states"]])
def test_ignored_outputs_are_left_out_the_same(tmp_path, ignored):
    outcomes = both(tmp_path, Scenario(models.bert_with_hidden_states, arguments={"per_device_eval_batch_size": 2}))
    assert_same_prediction(*predictions_of(outcomes, data.sentences(5), ignore_keys=ignored))


@pytest.mark.parametrize("side", [REFERENCE, OURS], ids=["reference", "ours"])
def test_hidden_states_come_once_where_a_model_collects_them_by_hooks_of_its_first_forward(tmp_path, side):
    seen = []

    def note(outputs, labels, num_items_in_batch=None):
        seen.append(len(outputs["hidden_states"]))
        return torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / num_items_in_batch

    arguments = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    scenario = Scenario(models.bert_with_hidden_states, arguments=arguments, options={"compute_loss_func": note})
    outcome = build(side, scenario, tmp_path / side.name)
    outcome.trainer.train_dataset = data.sentences(8)
    outcome.trainer.train()
    assert set(seen) == {2}


@pytest.mark.parametrize(
    "arguments",
    [
        {"prediction_loss_only": True},
        {"eval_accumulation_steps": 1},
        {"eval_accumulation_steps": 2},
        {"eval_do_concat_batches": False},
        {"bf16": True},
        {"dataloader_drop_last": True},
        {"per_device_eval_batch_size": 4},
    ],
)
def test_settings_of_prediction_act_the_same(tmp_path, arguments):
    outcomes = both(tmp_path, Scenario(models.Mlp, arguments={"per_device_eval_batch_size": 2, **arguments}))
    assert_same_prediction(*predictions_of(outcomes, EVALUATION))


def test_logits_are_preprocessed_the_same(tmp_path):
    options = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    assert_same_prediction(*predictions_of(both(tmp_path, Scenario(models.Mlp, options=options)), EVALUATION))


def test_metrics_are_given_the_same(tmp_path):
    given = []

    def keep(prediction):
        given.append(prediction)
        return {"mean": np.float32(prediction.predictions.mean())}

    arguments = {"include_for_metrics": ["inputs", "loss"], "per_device_eval_batch_size": 2}
    scenario = Scenario(models.bert_classifier, None, data.sentences(5), arguments, {"compute_metrics": keep})
    results = []
    for outcome in both(tmp_path, scenario):
        with warnings_of(outcome.side):
            results.append(outcome.trainer.evaluate())
    reference, ours = given
    for name in ("predictions", "label_ids", "inputs", "losses"):
        assert_same_arrays(getattr(reference, name), getattr(ours, name))
    assert len(tuple(ours)) == len(tuple(reference)) == 4
    # The reference alone reports how long it took to prepare a model that was not trained.
    assert_same_metrics(without_times(results[0]), without_times(results[1]))
    assert type(results[1]["eval_mean"]) is float


def test_metrics_of_each_batch_are_the_same(tmp_path):
    def counting():
        seen = []

        def compute(prediction, compute_result):
            assert isinstance(prediction.predictions, torch.Tensor)
            seen.append(len(prediction.label_ids))
            return {"rows": sum(seen), "batches": len(seen)} if compute_result else {}

        return compute

    arguments = {"batch_eval_metrics": True, "per_device_eval_batch_size": 2}
    results = []
    for side in (REFERENCE, OURS):
        scenario = Scenario(models.Mlp, None, EVALUATION, arguments, {"compute_metrics": counting()})
        with warnings_of(side):
            results.append(without_times(build(side, scenario, tmp_path / side.name).trainer.evaluate()))
    assert_same_metrics(*results)
    assert results[1]["eval_rows"] == len(EVALUATION)


def test_events_of_evaluation_and_prediction_are_the_same(tmp_path):
    outcomes = both(tmp_path, Scenario(models.Mlp, None, EVALUATION, {"per_device_eval_batch_size": 4}))
    for outcome in outcomes:
        with warnings_of(outcome.side):
            outcome.trainer.evaluate()
            outcome.trainer.predict(EVALUATION)
    reference, ours = outcomes
    assert ours.recorder.names() == reference.recorder.names()
    assert ours.recorder.names() == ["prediction_step"] * 3 + ["log", "evaluate"] + ["prediction_step"] * 3 + [
        "predict"
    ]
