"""Metrics of torchmetrics, and objects of one's own, that see each batch: in one process and in several."""

import numpy as np
import pytest
import torch
import torchmetrics
from shared.data import rows
from shared.models import LinearClassifier
from shared.results import assert_close, without_speed
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

from tr_core import Trainer, TrainingArguments
from tr_dist.testing import run_ranks

CLASSES = 3


class Mean:
    """An object that keeps what no library could combine: whatever it likes."""

    def reset(self):
        self.seen = []

    def update(self, preds, target):
        self.seen += [(int(p.argmax()), int(t)) for p, t in zip(preds, target, strict=True)]

    def compute(self):
        return {"right": np.mean([p == t for p, t in self.seen]), "seen": len(self.seen), "first": self.seen[0][1]}


def arguments(folder):
    return TrainingArguments(
        output_dir=folder,
        per_device_eval_batch_size=2,
        disable_tqdm=True,
        log_level="error",
        use_cpu=True,
        save_strategy="no",
    )


def metrics_of(kind):
    collection = torchmetrics.MetricCollection
    return {
        "sums": lambda: MulticlassAccuracy(CLASSES, average="micro"),
        "lists": lambda: {"auroc": MulticlassAUROC(CLASSES, thresholds=None)},
        "matrix": lambda: {"matrix": MulticlassConfusionMatrix(CLASSES)},
        "collection": lambda: collection([MulticlassAccuracy(CLASSES), MulticlassAUROC(CLASSES)]),
        "alone": lambda: MulticlassAccuracy(CLASSES, sync_on_compute=False),
        "own": lambda: {"own": Mean(), "accuracy": MulticlassAccuracy(CLASSES)},
        "mixed": lambda: collection(
            [MulticlassAccuracy(CLASSES), MulticlassAUROC(CLASSES, sync_on_compute=False)], compute_groups=False
        ),
    }[kind]()


def evaluate_metrics(folder, kinds, number):
    """Run in every rank; evaluates twice with each, to see that the second starts over."""
    found = {}
    for kind in kinds:
        trainer = Trainer(
            LinearClassifier(classes=CLASSES, seed=0),
            arguments(folder),
            eval_dataset=rows(number, 1, CLASSES),
            compute_metrics=metrics_of(kind),
            # Metrics of probabilities guess from each batch's numbers whether these are logits.
            preprocess_logits_for_metrics=lambda logits, labels: logits.softmax(-1),
        )
        found[kind] = [without_speed(trainer.evaluate()) for _ in range(2)]
    trainer.strategy.close()
    return found


def test_metrics_give_what_they_give_of_all_predictions_at_once(tmp_path):
    found = evaluate_metrics(str(tmp_path), ["sums", "lists", "matrix", "collection"], 13)
    data, model = rows(13, 1, CLASSES), LinearClassifier(classes=CLASSES, seed=0)
    labels = torch.stack([row["labels"] for row in data])
    logits = model(torch.stack([row["x"] for row in data]), labels)["logits"]
    assert found["sums"][0]["eval_MulticlassAccuracy"] == pytest.approx(
        float((logits.argmax(-1) == labels).float().mean())
    )
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for label, guess in zip(labels, logits.argmax(-1), strict=True):
        matrix[label, guess] += 1
    assert found["matrix"][0]["eval_matrix"] == matrix.tolist()
    auroc = MulticlassAUROC(CLASSES, thresholds=None)(logits.softmax(-1), labels)
    assert found["lists"][0]["eval_auroc"] == pytest.approx(float(auroc))
    assert set(found["collection"][0]) == {"eval_MulticlassAccuracy", "eval_MulticlassAUROC", "eval_loss"}


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_metrics_that_stream_are_those_of_one_process(tmp_path, world_size):
    kinds = ["sums", "lists", "matrix", "collection", "alone", "own"]
    number = 2 * world_size * 3 + 1  # the last batch has one sample: all other ranks hold it only to take part
    alone = evaluate_metrics(str(tmp_path / "1"), kinds, number)
    for found in run_ranks(evaluate_metrics, world_size, str(tmp_path / "n"), kinds, number, timeout_s=120):
        for kind in kinds:
            for evaluation in found[kind]:
                assert_close(evaluation, alone[kind][0])


def test_a_collection_that_combines_half_of_itself_is_refused(tmp_path):
    with pytest.raises(ValueError, match="some have sync_on_compute=True and some False"):
        run_ranks(evaluate_metrics, 2, str(tmp_path), ["mixed"], 8, timeout_s=120)


def test_fewer_samples_than_processes_are_an_error_where_metrics_wait_for_each_other(tmp_path):
    with pytest.raises(ValueError, match="rank 0 of 2 had no sample of this evaluation.*at least as many samples as"):
        run_ranks(evaluate_metrics, 2, str(tmp_path), ["lists"], 1, timeout_s=120)
