"""Metrics that see each batch and keep no prediction: objects with update, compute and reset."""

import pytest
import torch
from small_models import Classifier, samples

from tr_core import TrainerCallback
from tr_core.evaluation.metrics import StreamingMetrics, is_streaming
from tr_core.evaluation.output_buffer import OutputBuffer


class Accuracy:
    """Counts on the device what is right."""

    def __init__(self):
        self.resets = 0
        self.reset()

    def reset(self):
        self.right, self.seen, self.batches = torch.zeros(()), 0, []
        self.resets += 1

    def update(self, preds, target):
        assert not torch.is_grad_enabled()
        preds = preds.argmax(-1) if preds.dim() > 1 else preds
        self.right = self.right + (preds == target).sum()
        self.seen += len(target)
        self.batches.append(len(target))

    def compute(self):
        return self.right / self.seen


class ByClass(Accuracy):
    def compute(self):
        return {"right": self.right, "seen": self.seen, "halves": torch.tensor([0.5, 0.5])}


class Module(torch.nn.Module, Accuracy):
    def __init__(self):
        torch.nn.Module.__init__(self)
        Accuracy.__init__(self)


def accuracy(prediction):
    return {"Accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def test_a_metric_that_streams_gives_what_a_function_of_all_predictions_gives(make_trainer):
    options = {"eval_dataset": samples(11), "per_device_eval_batch_size": 4}
    metric = Accuracy()
    streamed = make_trainer(**options, compute_metrics=metric).evaluate()
    whole = make_trainer(**options, compute_metrics=accuracy).evaluate()
    assert streamed["eval_Accuracy"] == pytest.approx(whole["eval_Accuracy"])
    assert streamed["eval_loss"] == whole["eval_loss"]
    assert metric.batches == [4, 4, 3]
    assert type(streamed["eval_Accuracy"]) is float


def test_nothing_is_kept_of_the_predictions(make_trainer, monkeypatch):
    kept = []
    monkeypatch.setattr(OutputBuffer, "add", lambda self, tree, flush=False: kept.append(tree))
    trainer = make_trainer(eval_dataset=samples(6), compute_metrics=Accuracy())
    assert "eval_Accuracy" in trainer.evaluate()
    assert kept == []


def test_prediction_still_returns_the_predictions(make_trainer):
    output = make_trainer(compute_metrics={"exact": Accuracy()}).predict(samples(6))
    assert output.predictions.shape == (6, 3)
    assert 0 <= output.metrics["test_exact"] <= 1


def test_every_evaluation_begins_anew_and_the_last_value_can_be_looked_at(make_trainer):
    metric = Accuracy()
    trainer = make_trainer(eval_dataset={"a": samples(6), "b": samples(4, seed=1)}, compute_metrics=metric)
    before = metric.resets
    first, second = trainer.evaluate(), trainer.evaluate()
    assert metric.resets == before + 4
    assert first["eval_a_Accuracy"] == second["eval_a_Accuracy"]
    assert metric.seen == 4


def test_values_are_named_by_the_class_by_a_mapping_or_by_what_the_metric_says(make_trainer):
    metrics = {"top": Accuracy(), "all": ByClass()}
    result = make_trainer(eval_dataset=samples(6), compute_metrics=metrics).evaluate()
    assert {"eval_top", "eval_all_right", "eval_all_seen", "eval_all_halves"} <= set(result)
    assert result["eval_all_halves"] == [0.5, 0.5]
    alone = make_trainer(eval_dataset=samples(6), compute_metrics=ByClass()).evaluate()
    assert (alone["eval_right"], alone["eval_seen"]) == (result["eval_all_right"], 6)


def test_logits_are_preprocessed_before_a_metric_sees_them(make_trainer):
    class OnlyClasses(Accuracy):
        def update(self, preds, target):
            assert preds.dim() == 1
            super().update(preds, target)

    trainer = make_trainer(
        eval_dataset=samples(6),
        compute_metrics=OnlyClasses(),
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    assert trainer.evaluate()["eval_OnlyClasses"] >= 0


def test_bfloat16_reaches_a_metric_as_float32(make_trainer):
    class Typed(Accuracy):
        def update(self, preds, target):
            assert (preds.dtype, target.dtype) == (torch.float32, torch.int64)
            super().update(preds, target)

    trainer = make_trainer(eval_dataset=samples(6), compute_metrics=Typed(), bf16=True)
    assert "eval_Typed" in trainer.evaluate()


def test_without_labels_there_is_no_value(make_trainer):
    data = [{"x": row["x"]} for row in samples(5)]
    output = make_trainer(compute_metrics=Accuracy()).predict(data)
    assert not any("Accuracy" in name for name in output.metrics)
    assert output.predictions.shape == (5, 3)


def test_only_the_loss_is_computed_where_only_the_loss_is_wanted(make_trainer):
    metric = Accuracy()
    result = make_trainer(eval_dataset=samples(5), compute_metrics=metric, prediction_loss_only=True).evaluate()
    assert (metric.batches, "eval_loss" in result, "eval_Accuracy" in result) == ([], True, False)


def test_a_value_that_streams_chooses_the_best_model(make_trainer):
    trainer = make_trainer(
        eval_dataset=samples(8),
        compute_metrics={"exact": Accuracy()},
        metric_for_best_model="exact",
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer.train()
    values = [entry["eval_exact"] for entry in trainer.state.log_history if "eval_exact" in entry]
    assert trainer.state.best_metric == max(values)


def test_an_object_that_is_called_with_compute_result_is_a_function(make_trainer):
    class OwnAffair(Accuracy):
        def __call__(self, prediction, compute_result):
            self.update(torch.as_tensor(prediction.predictions), torch.as_tensor(prediction.label_ids))
            return {"seen": self.seen} if compute_result else {}

    assert not is_streaming(OwnAffair())
    trainer = make_trainer(eval_dataset=samples(6), compute_metrics=OwnAffair(), batch_eval_metrics=True)
    with torch.no_grad():
        assert trainer.evaluate()["eval_seen"] == 6


class OneOfTwo:
    """What a strategy of several ranks says of another rank's evaluation."""

    world_size, device = 2, torch.device("cpu")

    def gather_objects(self, value):
        return [value, False]


def test_metrics_of_modules_go_to_the_device_of_the_evaluation(make_trainer):
    moved = []
    metric = Module()
    metric.to = lambda device: moved.append(torch.device(device))
    make_trainer(eval_dataset=samples(4), compute_metrics=metric).evaluate()
    assert moved == [torch.device("cpu")]


def test_a_rank_without_samples_is_an_error_where_a_metric_would_wait_for_it(monkeypatch):
    monkeypatch.setattr("tr_core.evaluation.metrics.combines_itself", lambda metric: True)
    streaming = StreamingMetrics(Accuracy(), OneOfTwo())
    streaming.update(torch.ones(2, 3), torch.zeros(2), True, lambda tree: tree)
    with pytest.raises(ValueError, match="rank 1 of 2 had no sample .* at least as many samples as"):
        streaming.compute()


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        ({"a": len}, TypeError, "each of its values must have update.*'a' is a builtin_function_or_method"),
        ({}, TypeError, "each of its values must have update.*it is empty"),
        ("accuracy", TypeError, "compute_metrics is a str; it must be a function of an EvalPrediction"),
    ],
)
def test_what_is_no_metric_is_refused_at_once(make_trainer, metrics, error, message):
    with pytest.raises(error, match=message):
        make_trainer(compute_metrics=metrics)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_eval_metrics": True}, "it is a metric with update, which sees every batch anyway"),
        ({"include_for_metrics": ["inputs"]}, "compute_metrics is a metric with update\\(preds, target\\)"),
    ],
)
def test_options_of_functions_are_refused_for_metrics_that_stream(make_trainer, options, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(compute_metrics=Accuracy(), **options)


def test_events_between_batches_see_metrics_in_the_making(make_trainer):
    metric, seen = Accuracy(), []

    class Look(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            seen.append(metric.seen)

    make_trainer(
        model=Classifier(),
        eval_dataset=samples(6),
        per_device_eval_batch_size=2,
        compute_metrics=metric,
        callbacks=[Look],
    ).evaluate()
    assert seen == [2, 4, 6]
