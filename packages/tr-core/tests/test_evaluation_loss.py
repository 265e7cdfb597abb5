"""The mean loss of an evaluation, over samples or over tokens, and perplexity."""

import math

import pytest
import torch
from small_models import Classifier, CountedSum, samples
from torch import nn

from tr_core.evaluation import metrics as evaluation_loss
from tr_core.evaluation.metrics import perplexity

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


def test_perplexity_chooses_the_best_model_smaller_being_better(make_trainer):
    rows = sequences()
    trainer = make_trainer(
        model=LanguageModel(),
        train_dataset=rows,
        eval_dataset=rows,
        eval_perplexity=True,
        metric_for_best_model="perplexity",
        eval_strategy="epoch",
        num_train_epochs=3,
        learning_rate=0.1,
    )
    trainer.train()
    values = [entry["eval_perplexity"] for entry in trainer.state.log_history if "eval_perplexity" in entry]
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
