"""The mean loss of an evaluation, perplexity, and metrics that see each batch and keep no prediction."""

import math

import pytest
import torch
from support.callbacks import on
from support.data import samples
from support.models import Classifier, CountedSum
from support.runs import log_of
from torch import nn

from tr_core.evaluation import metrics as evaluation_loss
from tr_core.evaluation.metrics import StreamingMetrics, is_streaming, perplexity
from tr_core.evaluation.output_buffer import OutputBuffer

IGNORED = -100


class LanguageModel(nn.Module):
    """Predicts each token of a sequence; divides by the count it is given."""

    def __init__(self, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.scale = nn.Embedding(7, 7), scale

    def forward(self, tokens, labels=None, num_items_in_batch=None):
        logits = self.embedding(tokens) * self.scale
        if labels is None:
            return {"logits": logits}
        total = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="sum")
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}


def sequences(number=9, length=6):
    generator = torch.Generator().manual_seed(0)
    rows = []
    for index in range(number):
        tokens = torch.randint(0, 7, (length,), generator=generator)
        labels = tokens.roll(1)
        labels[: index % length] = IGNORED
        rows.append({"tokens": tokens, "labels": labels})
    return rows


def true_mean(model, rows):
    with torch.no_grad():
        return float(model(torch.stack([r["tokens"] for r in rows]), torch.stack([r["labels"] for r in rows]))["loss"])


@pytest.mark.parametrize("batch_size", [1, 2, 4, 9, 16])
def test_the_loss_of_tokens_does_not_depend_on_the_batch_size(make_trainer, batch_size):
    model, rows = LanguageModel(), sequences()
    trainer = make_trainer(model=model, eval_dataset=rows, per_device_eval_batch_size=batch_size, eval_perplexity=True)
    result = trainer.evaluate()
    assert result["eval_loss"] == pytest.approx(true_mean(model, rows), rel=1e-6)
    assert result["eval_perplexity"] == math.exp(result["eval_loss"])


def test_perplexity_is_reported_only_when_asked_for_and_with_the_prefix(make_trainer):
    rows = sequences()
    assert "eval_perplexity" not in make_trainer(model=LanguageModel(), eval_dataset=rows).evaluate()
    output = make_trainer(model=LanguageModel(), eval_perplexity=True).predict(rows)
    assert output.metrics["test_perplexity"] == math.exp(output.metrics["test_loss"])
    unlabelled = [{"tokens": row["tokens"]} for row in rows]
    metrics = make_trainer(model=LanguageModel(), eval_perplexity=True).predict(unlabelled).metrics
    assert not any("perplexity" in name for name in metrics)


def test_a_perplexity_beyond_all_numbers_is_infinite():
    assert perplexity(1000.0) == math.inf
    assert math.isnan(perplexity(math.nan))
    assert perplexity(0.0) == 1.0


def test_an_infinite_perplexity_is_a_result_and_no_failure(make_trainer):
    trainer = make_trainer(model=LanguageModel(scale=1e5), eval_dataset=sequences(), eval_perplexity=True)
    result = trainer.evaluate()
    assert result["eval_perplexity"] == math.inf
    assert math.isfinite(result["eval_loss"])


def test_perplexity_chooses_the_best_model_smaller_being_better(make_trained):
    rows = sequences()
    trainer = make_trained(
        model=LanguageModel(),
        train_dataset=rows,
        eval_dataset=rows,
        eval_perplexity=True,
        metric_for_best_model="perplexity",
        eval_strategy="epoch",
        num_train_epochs=3,
        learning_rate=0.1,
    )
    values = log_of(trainer, "eval_perplexity")
    assert len(set(values)) == 3
    assert trainer.state.best_metric == min(values)


def test_perplexity_of_a_loss_that_counts_no_tokens_is_refused_at_once(make_trainer):
    with pytest.raises(ValueError, match="the loss of Classifier is one over each batch.*must take num_items_in_batch"):
        make_trainer(model=Classifier(), eval_perplexity=True)


def test_perplexity_of_classes_is_refused_at_the_first_batch(make_trainer):
    trainer = make_trainer(model=CountedSum(), eval_dataset=samples(4), eval_perplexity=True)
    with pytest.raises(ValueError, match=r"needs a loss over tokens: .* not \(4,\) of torch.int64"):
        trainer.evaluate()


def test_many_batches_are_summed_like_few(make_trainer, monkeypatch):
    rows = sequences(20)
    plain = make_trainer(model=LanguageModel(), eval_dataset=rows, per_device_eval_batch_size=1).evaluate()
    monkeypatch.setattr(evaluation_loss, "_CHUNK", 3)
    chunked = make_trainer(model=LanguageModel(), eval_dataset=rows, per_device_eval_batch_size=1).evaluate()
    assert chunked["eval_loss"] == plain["eval_loss"]


class GivenLoss(nn.Module):
    """Has the mean of what its samples say for a loss."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, labels=None):
        return {"loss": x.mean() * self.weight, "logits": x}


def given(*values):
    return [{"x": torch.tensor([value]), "labels": torch.tensor(0)} for value in values]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_batch_whose_loss_is_no_number_counts_neither_above_nor_below_the_line(make_trainer, bad):
    rows = given(1.0, 2.0, bad, 3.0, 7.0)
    options = {"model": GivenLoss(), "eval_dataset": rows, "per_device_eval_batch_size": 2}
    # Batches of (1, 2), (bad, 3) and (7).
    filtered = make_trainer(**options, logging_nan_inf_filter=True).evaluate()["eval_loss"]
    assert filtered == pytest.approx((1.5 * 2 + 7.0 * 1) / 3, rel=1e-6)
    kept = make_trainer(**options, logging_nan_inf_filter=False).evaluate()["eval_loss"]
    assert math.isnan(kept) if math.isnan(bad) else kept == bad


def test_an_evaluation_of_losses_that_are_no_numbers_has_no_number_either(make_trainer):
    trainer = make_trainer(model=GivenLoss(), eval_dataset=given(math.nan, math.nan), logging_nan_inf_filter=True)
    assert math.isnan(trainer.evaluate()["eval_loss"])


def test_batches_count_by_their_samples_where_the_loss_is_one_of_samples(make_trainer):
    trainer = make_trainer(model=GivenLoss(), eval_dataset=given(1.0, 2.0, 3.0, 10.0), per_device_eval_batch_size=3)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(4.0, rel=1e-6)


# Metrics that see each batch


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


def test_every_evaluation_starts_over_and_the_last_value_can_be_looked_at(make_trainer):
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


def test_a_value_that_streams_chooses_the_best_model(make_trained):
    trainer = make_trained(
        eval_dataset=samples(8),
        compute_metrics={"exact": Accuracy()},
        metric_for_best_model="exact",
        eval_strategy="steps",
        eval_steps=2,
    )
    values = log_of(trainer, "eval_exact")
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
    look = on("on_prediction_step", lambda **_: seen.append(metric.seen))
    make_trainer(
        model=Classifier(),
        eval_dataset=samples(6),
        per_device_eval_batch_size=2,
        compute_metrics=metric,
        callbacks=[look],
    ).evaluate()
    assert seen == [2, 4, 6]
