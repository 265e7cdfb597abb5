"""Evaluate in several gloo processes: losses, generations and objects are those of one process."""

import math

import numpy as np
import pytest
import torch
from shared.data import rows
from shared.models import LinearClassifier
from shared.results import assert_close, without_speed
from torch import nn

from tr_core import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from tr_dist.testing import run_ranks

CLASSES = 3


def network():
    return LinearClassifier(classes=CLASSES, seed=0)


class Naming(LinearClassifier):
    def forward(self, x, labels=None):
        outputs = super().forward(x, labels)
        return {**outputs, "texts": [f"{row.argmax()} of {row.sum():.3f}" for row in outputs["logits"]]}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 7)

    def forward(self, tokens, labels=None, num_items_in_batch=None):
        logits = self.embedding(tokens)
        total = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        count = (labels != -100).sum() if num_items_in_batch is None else num_items_in_batch
        return {"loss": total / count, "logits": logits}


class Counter(nn.Module):
    """Generates as many tokens as the largest first token of its batch says, so that ranks differ in length."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, input_ids, labels=None):
        return {"loss": (input_ids.float().mean(1) * self.weight).mean(), "logits": input_ids}

    def generate(self, input_ids, **options):
        steps = torch.arange(int(input_ids[:, 0].max()))
        return torch.where(steps < input_ids[:, :1], input_ids[:, :1] * 10 + steps, 0)


def arguments(folder, **options):
    common = {"disable_tqdm": True, "log_level": "error", "use_cpu": True, "save_strategy": "no"}
    kind = Seq2SeqTrainingArguments if "predict_with_generate" in options else TrainingArguments
    return kind(output_dir=folder, **{"per_device_eval_batch_size": 2, **common, **options})


def evaluate_loss(folder, number):
    trainer = Trainer(
        network(),
        arguments(folder, per_device_eval_batch_size=8),
        eval_dataset=rows(number, 1, CLASSES),
    )
    tokens = [
        {"tokens": torch.tensor([i % 7] * 5), "labels": torch.tensor([-100] * (i % 5) + [i % 7] * (5 - i % 5))}
        for i in range(number)
    ]
    other = Trainer(Tokens(), arguments(folder, eval_perplexity=True), eval_dataset=tokens)
    result = without_speed(trainer.evaluate()), without_speed(other.evaluate())
    trainer.strategy.close()
    return result


def test_the_mean_loss_of_nine_samples_and_perplexity_are_those_of_one_process(tmp_path):
    alone = evaluate_loss(str(tmp_path / "1"), 9)
    data = rows(9, 1, CLASSES)
    expected = network()(torch.stack([row["x"] for row in data]), torch.stack([row["labels"] for row in data]))["loss"]
    assert alone[0]["eval_loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert alone[1]["eval_perplexity"] == math.exp(alone[1]["eval_loss"])
    for rank in run_ranks(evaluate_loss, 2, str(tmp_path / "n"), 9, timeout_s=120):
        for given, single in zip(rank, alone, strict=True):
            assert_close(given, single)


FIRSTS = [1, 2, 7, 3, 2, 2, 5, 4, 1]


def generate(folder, limit):
    """Run in every rank; a limit is told to the model, which does not heed it, so rows are padded to it at least."""
    data = [{"input_ids": torch.tensor([n, n]), "labels": torch.tensor([n])} for n in FIRSTS]
    options = {"predict_with_generate": True, "generation_max_length": limit}
    model = Counter()
    model.config = type("Config", (), {"pad_token_id": 99})
    seen = []
    trainer = Seq2SeqTrainer(
        model,
        arguments(folder, **options),
        eval_dataset=data,
        compute_metrics=lambda p: seen.append(p.predictions) or {"rows": len(p.predictions)},
    )
    metrics = without_speed(trainer.evaluate())
    output = trainer.predict(data)
    trainer.strategy.close()
    return metrics, seen[0], output.predictions, output.label_ids


@pytest.mark.parametrize("limit", [None, 9])
def test_generations_of_different_lengths_come_together_in_order(tmp_path, limit):
    for metrics, seen, predictions, labels in run_ranks(generate, 2, str(tmp_path), limit, timeout_s=120):
        assert metrics["eval_rows"] == len(FIRSTS)
        assert predictions.shape == (len(FIRSTS), limit or max(FIRSTS))
        for row, first in zip(predictions, FIRSTS, strict=True):
            assert row[:first].tolist() == [first * 10 + step for step in range(first)]
            assert set(row[first:].tolist()) <= ({0, 99} if limit else {0, -100})
        assert labels[:, 0].tolist() == FIRSTS
        np.testing.assert_array_equal(seen, predictions)
        assert metrics["eval_loss"] == pytest.approx(np.mean(FIRSTS))


def evaluate_objects(folder, number):
    trainer = Trainer(Naming(seed=0), arguments(folder, eval_use_gather_object=True))
    output = trainer.predict(rows(number, 1, CLASSES))
    trainer.strategy.close()
    return output.predictions, output.label_ids


@pytest.mark.parametrize("number", [8, 9])
def test_objects_come_together_in_the_order_of_the_data(tmp_path, number):
    (logits, texts), labels = evaluate_objects(str(tmp_path / "1"), number)
    for (given_logits, given_texts), given_labels in run_ranks(
        evaluate_objects, 2, str(tmp_path / "n"), number, timeout_s=120
    ):
        np.testing.assert_allclose(given_logits, logits, rtol=1e-6)
        assert given_texts == texts
        assert given_labels.tolist() == labels.tolist()
