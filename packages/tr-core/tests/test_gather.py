"""Outputs that are not tensors: lists of objects, one a sample, and whatever else a model gives."""

import numpy as np
import pytest
import torch
from support.data import samples
from torch import nn

from tr_core import SingleDevice
from tr_core.evaluation.gather import gather_objects, gather_rows


class Detector(nn.Module):
    """Gives a list of boxes for each sample, as many as it finds, and a text."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x, labels=None):
        boxes = [{"boxes": row[: 1 + i % 3].reshape(-1, 1) * self.weight, "score": float(i)} for i, row in enumerate(x)]
        texts = [f"{len(x)}:{i}" for i in range(len(x))]
        return {"loss": x.mean() * self.weight, "boxes": boxes, "texts": texts, "pooled": x, "version": "2"}


def test_objects_are_kept_one_a_sample_in_the_order_of_the_data(make_trainer):
    trainer = make_trainer(model=Detector(), per_device_eval_batch_size=4, eval_use_gather_object=True)
    boxes, texts, pooled, version = trainer.predict(samples(6)).predictions
    assert texts == ["4:0", "4:1", "4:2", "4:3", "2:0", "2:1"]
    assert [found["boxes"].shape for found in boxes] == [(1, 1), (2, 1), (3, 1), (1, 1), (1, 1), (2, 1)]
    assert isinstance(boxes[0]["boxes"], np.ndarray)
    assert [found["score"] for found in boxes] == [0, 1, 2, 3, 0, 1]
    assert pooled.shape == (6, 8)
    assert version == ["2", "2"]  # one a batch


def test_without_the_option_only_tensors_are_kept(make_trainer):
    trainer = make_trainer(model=Detector(), per_device_eval_batch_size=6)
    boxes, texts, pooled, version = trainer.predict(samples(6)).predictions
    assert texts == (None,) * 6
    assert version is None
    assert boxes[0]["boxes"].shape == (1, 1)
    assert pooled.shape == (6, 8)


def test_labels_and_metrics_may_be_objects(make_trainer):
    seen = {}

    def metrics(prediction):
        seen.update(predictions=prediction.predictions, labels=prediction.label_ids)
        return {"rows": len(prediction.label_ids)}

    def collate(rows):
        return {"x": torch.stack([row["x"] for row in rows]), "labels": [{"class": int(row["labels"])} for row in rows]}

    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x, labels=None):
            assert isinstance(labels[0], dict)
            return {"loss": x.mean() * self.weight, "classes": [label["class"] for label in labels]}

    data = samples(5)
    trainer = make_trainer(
        model=Classes(),
        data_collator=collate,
        eval_dataset=data,
        per_device_eval_batch_size=2,
        eval_use_gather_object=True,
        compute_metrics=metrics,
    )
    assert trainer.evaluate()["eval_rows"] == 5
    expected = [int(row["labels"]) for row in data]
    assert seen == {"predictions": expected, "labels": [{"class": value} for value in expected]}


@pytest.mark.parametrize("concatenate", [True, False])
def test_batches_of_objects_can_be_kept_apart(make_trainer, concatenate):
    trainer = make_trainer(
        model=Detector(),
        per_device_eval_batch_size=4,
        eval_use_gather_object=True,
        eval_do_concat_batches=concatenate,
    )
    found = trainer.predict(samples(6), ignore_keys=["boxes", "pooled", "version"]).predictions
    whole = ["4:0", "4:1", "4:2", "4:3", "2:0", "2:1"]
    assert found == (whole if concatenate else [whole[:4], whole[4:]])


def test_preprocessing_may_turn_tensors_into_objects(make_trainer):
    trainer = make_trainer(
        per_device_eval_batch_size=4,
        eval_use_gather_object=True,
        preprocess_logits_for_metrics=lambda logits, labels: [str(tuple(row.shape)) for row in logits],
    )
    assert trainer.predict(samples(6)).predictions == ["(3,)"] * 6


class TwoRanks(SingleDevice):
    """Answers like a group of two ranks, of which the other one has what it is given here."""

    world_size = 2

    def __init__(self, other):
        super().__init__("cpu")
        self.other = list(other)

    def gather(self, tensor):
        theirs = self.other.pop(0)
        assert theirs.dtype == tensor.dtype
        return torch.cat([tensor, theirs])

    def gather_objects(self, value):
        return [value, self.other.pop(0)]


def test_objects_of_a_rank_that_only_fills_up_are_left_out():
    assert gather_objects(["a"], TwoRanks([["b"]]), 2, True) == ["a", "b"]
    assert gather_objects(["a"], TwoRanks([["b"]]), 1, False) == ["b"]
    assert gather_objects(("x", {"y": ["z"]}), TwoRanks([["u"], ["v"]]), 2, True) == (["x", "u"], {"y": ["z", "v"]})


def test_tensors_whose_rows_are_no_samples_come_whole_from_every_rank():
    """A scalar, such as a loss of its own, is one row of each rank, and not cut like samples."""
    shapes, values = torch.tensor([[1, 0]]), torch.tensor([2.0])
    assert gather_rows(torch.tensor(1.0), TwoRanks([shapes, values]), 8).tolist() == [1.0, 2.0]


class Alike:
    """The exchange of 1,024 ranks with the same rows."""

    device, world_size = torch.device("cpu"), 1024

    def gather(self, tensor):
        return tensor.repeat(self.world_size, *[1] * (tensor.dim() - 1))


def test_whole_batches_of_many_ranks_are_joined_without_a_slice_of_each(monkeypatch):
    monkeypatch.setattr(torch, "cat", None)
    rows = torch.arange(6).view(2, 3)
    assert torch.equal(gather_rows(rows, Alike(), 2048), rows.repeat(1024, 1))


@pytest.mark.parametrize("count", [1, 1000, 1023])
def test_ranks_without_a_sample_add_none(count):
    assert len(gather_rows(torch.ones(1, 2), Alike(), count)) == count


def test_masks_of_different_lengths_are_padded_as_numbers():
    mine, theirs = torch.ones(1, 2, dtype=torch.bool), torch.ones(1, 3, dtype=torch.int64)
    joined = gather_rows(mine, TwoRanks([torch.tensor([[1, 3]]), theirs]), 2)
    assert joined.tolist() == [[1, 1, -100], [1, 1, 1]]
