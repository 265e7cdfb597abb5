"""The metric that chooses the best model: known to be missing before training, or at the first evaluation."""

import pytest
from support.data import samples
from support.runs import log_of

from tr_core import EarlyStoppingCallback, Trainer, TrainerCallback

EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "accuracy"}


def started(trainer):
    """Train, and return the error's text and how many steps were made before it."""
    with pytest.raises(ValueError) as caught:
        trainer.train()
    return str(caught.value), trainer.state.global_step


def test_a_metric_that_nothing_computes_is_an_error_before_the_first_step(make_trainer):
    message, steps = started(make_trainer(eval_dataset=samples(4), **EVALUATED))
    assert steps == 0
    assert "metric_for_best_model='accuracy' will not be among the results of an evaluation" in message
    assert "eval_loss, eval_runtime, eval_samples_per_second, eval_steps_per_second; name one" in message


def test_of_several_data_sets_the_metrics_are_named_before_the_first_step(make_trainer, make_trained):
    data = {"near": samples(4), "far": samples(4)}
    message, steps = started(make_trainer(eval_dataset=data, **{**EVALUATED, "metric_for_best_model": "loss"}))
    assert steps == 0
    assert "eval_near_loss" in message
    assert "eval_far_loss" in message
    trainer = make_trained(eval_dataset=data, **{**EVALUATED, "metric_for_best_model": "far_loss"})
    values = log_of(trainer, "eval_far_loss")
    assert trainer.state.best_metric == min(values)


def test_early_stopping_does_not_hide_what_is_known(make_trainer):
    _, steps = started(make_trainer(eval_dataset=samples(4), callbacks=[EarlyStoppingCallback(2)], **EVALUATED))
    assert steps == 0


@pytest.mark.parametrize("metric", ["loss", "eval_loss", "runtime", "eval_steps_per_second"])
def test_metrics_of_every_evaluation_are_accepted(make_trained, metric):
    trainer = make_trained(eval_dataset=samples(4), **{**EVALUATED, "metric_for_best_model": metric})
    name = f"eval_{metric.removeprefix('eval_')}"
    values = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert len(values) == 5
    assert trainer.state.best_metric == (min if trainer.args.greater_is_better is False else max)(values)


def test_a_metric_that_compute_metrics_does_not_give_is_an_error_at_the_first_evaluation(make_trainer):
    trainer = make_trainer(eval_dataset=samples(4), compute_metrics=lambda prediction: {"f1": 0.5}, **EVALUATED)
    message, steps = started(trainer)
    assert steps == 1
    assert "metric_for_best_model='accuracy' is not among the results of the evaluation" in message
    assert "'eval_f1', 'eval_loss'" in message
    assert trainer.model.training
    assert not trainer.is_in_train


@pytest.mark.parametrize("value", [[0.5, 0.5], "high", {"a": 1.0}])
def test_a_metric_that_is_no_number_cannot_choose(make_trainer, value):
    trainer = make_trainer(eval_dataset=samples(4), compute_metrics=lambda prediction: {"accuracy": value}, **EVALUATED)
    message, _ = started(trainer)
    assert f"needs a metric that is one number; eval_accuracy is {value!r}" in message


class AddsMetrics(Trainer):
    def evaluate(self, *args, **kwargs):
        return {**super().evaluate(*args, **kwargs), "eval_accuracy": 0.5}


class Adds(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        metrics["eval_accuracy"] = 0.5


@pytest.mark.parametrize("parts", [{"trainer_class": AddsMetrics}, {"callbacks": [Adds]}])
def test_a_metric_that_a_subclass_or_a_callback_adds_is_found(make_trained, parts):
    trainer = make_trained(eval_dataset=samples(4), **parts, **EVALUATED)
    assert trainer.state.best_metric == 0.5


def test_metrics_given_after_construction_count(make_trainer):
    trainer = make_trainer(eval_dataset=samples(4), **EVALUATED)
    trainer.compute_metrics = lambda prediction: {"accuracy": 0.25}
    trainer.train()
    assert trainer.state.best_metric == 0.25


def test_without_evaluations_no_metric_is_missed(make_trained):
    trainer = make_trained(**{**EVALUATED, "eval_strategy": "no"})
    assert trainer.state.global_step == 5
