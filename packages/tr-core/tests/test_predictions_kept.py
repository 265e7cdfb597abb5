"""What a prediction keeps, and which metrics are computed, where batches are metered one by one or have no labels."""

import numpy as np
import torch
from small_models import Classifier, samples
from torch import nn

from tr_core import Trainer


class Running:
    """Counts samples batch by batch."""

    def __init__(self):
        self.number = 0

    def __call__(self, prediction, compute_result):
        self.number += len(prediction.predictions)
        return {"number": self.number} if compute_result else {}


def test_predict_returns_predictions_also_with_metrics_of_batches(make_trainer):
    model, rows = Classifier(), samples(7)
    trainer = make_trainer(
        model=model, compute_metrics=Running(), batch_eval_metrics=True, per_device_eval_batch_size=3
    )
    output = trainer.predict(rows)
    with torch.no_grad():
        wanted = model.eval()(torch.stack([row["x"] for row in rows]))["logits"].numpy()
    np.testing.assert_allclose(output.predictions, wanted, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(output.label_ids, [int(row["labels"]) for row in rows])
    assert output.metrics["test_number"] == 7


def test_an_evaluation_with_metrics_of_batches_keeps_none(make_trainer):
    trainer = make_trainer(
        model=Classifier(), compute_metrics=Running(), batch_eval_metrics=True, per_device_eval_batch_size=3
    )
    output = trainer.evaluation_loop(trainer.get_test_dataloader(samples(7)), "Evaluation")
    assert output.predictions is None
    assert output.metrics["eval_number"] == 7


class Pairs(nn.Module):
    """Pulls two views of a sample together; has no labels, as CLIP."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, return_loss=True):
        seen = self.layer(x)
        outputs = {"embeddings": seen}
        return {"loss": (seen**2).mean(), **outputs} if return_loss else outputs


class ReturnsPair(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def test_metrics_are_computed_of_a_model_that_needs_no_labels(make_trainer):
    rows, seen = [{"x": row["x"]} for row in samples(7)], []

    def metrics(prediction):
        seen.append((prediction.predictions.shape, prediction.label_ids))
        return {"norm": float((prediction.predictions**2).mean())}

    trainer = make_trainer(8, ReturnsPair, model=Pairs(), compute_metrics=metrics, per_device_eval_batch_size=3)
    found = trainer.evaluate(rows)
    assert seen == [((7, 4), ())]
    assert found["eval_norm"] > 0
    assert abs(found["eval_loss"] - found["eval_norm"]) < 1e-5
    assert trainer.predict(rows).metrics["test_norm"] == found["eval_norm"]


def test_a_batch_may_ask_for_no_loss(make_trainer):
    rows = [{"x": row["x"], "return_loss": False} for row in samples(4)]

    def collate(found):
        return {"x": torch.stack([row["x"] for row in found]), "return_loss": found[0]["return_loss"]}

    output = make_trainer(8, model=Pairs(), data_collator=collate).predict(rows)
    assert "test_loss" not in output.metrics
    assert output.predictions.shape == (4, 4)
