"""Columns that the model does not take are out of sight, and within reach of a collator that names them."""

import copy
import logging
import operator
import pickle

import pytest
import torch
from support.data import MapStyle, Stream, samples
from support.models import Base, Classifier
from torch import nn

from tr_core import Trainer, default_data_collator
from tr_core.data.columns import NarrowedSample
from tr_core.data.fetch import KeepColumns


def narrowed():
    return NarrowedSample({"x": 1, "text": "a", "n": None}, frozenset({"x", "labels"}), set())


# A sample


def test_a_narrowed_sample_shows_only_what_the_model_takes():
    sample = narrowed()
    assert list(sample) == list(sample.keys()) == ["x"]
    assert list(sample.items()) == [("x", 1)]
    assert len(sample) == 1
    assert "text" not in sample
    assert sample.get("text") is None
    assert dict(sample) == {**sample} == sample == {"x": 1}


def test_a_column_out_of_sight_is_reached_by_its_name():
    sample = narrowed()
    assert sample["text"] == operator.itemgetter("text")(sample) == "a"
    assert sample["n"] is None
    assert sample.pop("text") == "a"
    assert sample.pop("text", "gone") == "gone"
    del sample["n"]
    with pytest.raises(KeyError, match="n"):
        sample["n"]
    assert sample.pop("x") == 1
    assert sample == {}


@pytest.mark.parametrize("do", [lambda s: s["txt"], lambda s: s.pop("txt"), lambda s: operator.delitem(s, "txt")])
def test_a_column_that_is_not_there_is_a_key_error(do):
    with pytest.raises(KeyError, match="txt"):
        do(narrowed())


@pytest.mark.parametrize(
    "copied", [lambda s: s.copy(), copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_a_copy_of_a_sample_reaches_the_same_columns(copied):
    again = copied(narrowed())
    assert again == {"x": 1}
    assert again.pop("text") == "a"
    assert narrowed()["text"] == "a"


# A collator


def rows(number=8):
    return [{**row, "text": f"text {i}", "weight": float(i)} for i, row in enumerate(samples(number))]


def test_a_collator_gets_by_name_what_the_model_does_not_take(make_trained):
    read = []

    def collate(batch):
        read.extend(sample["text"] for sample in batch)
        read.extend(sample.pop("weight") for sample in batch)
        return default_data_collator(batch)

    make_trained(train_dataset=rows(4), data_collator=collate)
    assert sorted(read, key=str) == [0.0, 1.0, 2.0, 3.0, "text 0", "text 1", "text 2", "text 3"]


def test_data_without_any_column_of_the_model_trains_if_the_collator_makes_the_inputs(make_trainer):
    encoded = {row["text"]: row for row in rows()}

    def encode(batch):
        chosen = [encoded[sample["text"]] for sample in batch]
        return {name: torch.stack([row[name] for row in chosen]) for name in ("x", "labels")}

    trainer = make_trainer(train_dataset=[{"text": text} for text in encoded], data_collator=encode)
    assert trainer.train().global_step == 2


@pytest.mark.parametrize("collate", [default_data_collator, lambda batch: {"x": batch[0].popitem()}])
def test_data_of_which_nothing_is_left_is_refused_with_its_columns_and_those_of_the_model(make_trainer, collate):
    trainer = make_trainer(train_dataset=[{"text": "a", "y": 1}] * 4, data_collator=collate)
    message = (
        r"no column of the data is left: it has \['text', 'y'\], the forward of Classifier takes "
        r"\['label', 'label_ids', 'labels', 'x'\], and the data collator asks for none by name.*"
        "remove_unused_columns=False"
    )
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_an_error_of_a_collator_that_found_its_columns_is_its_own(make_trainer):
    trainer = make_trainer(train_dataset=[{"text": "a"}] * 4, data_collator=lambda batch: int(batch[0]["text"]))
    with pytest.raises(ValueError, match="invalid literal"):
        trainer.train()


def test_a_collator_can_keep_columns_in_sight(make_trained):
    class Weighted(Trainer):
        seen = 0.0

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            self.seen += float(inputs.pop("weight").sum())
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    class Collate:
        required_columns = ("weight",)

        def __call__(self, batch):
            return default_data_collator(batch)

    trainer = make_trained(trainer_class=Weighted, train_dataset=rows(8), data_collator=Collate())
    assert trainer.seen == sum(range(8))


def test_required_columns_that_are_one_string_are_refused():
    def collate(batch):
        return batch

    collate.required_columns = "text"
    with pytest.raises(TypeError, match=r"required_columns='text' of the data collator must be several names"):
        KeepColumns(collate, ["x"], "Model")


def test_samples_that_differ_in_their_columns_are_each_narrowed():
    seen = []
    keep = KeepColumns(lambda batch: seen.extend(map(dict, batch)), ["x"], "Model")
    keep([{"x": 1}, {"x": 2, "note": "a"}])
    assert seen == [{"x": 1}, {"x": 2}]


def test_samples_that_are_no_mappings_and_those_that_fit_are_left_as_they_are():
    keep = KeepColumns(lambda batch: batch, ["x", "y"], "Model")
    for batch in ([(1, 2)], [torch.ones(2)], [{"x": 1}]):
        assert keep(batch) is batch


def test_a_model_that_takes_anything_gets_all_columns(make_trainer):
    class Anything(Base):
        def forward(self, **inputs):
            assert set(inputs) == {"x", "labels", "weight"}
            return {"loss": nn.functional.cross_entropy(self.layers(inputs["x"]), inputs["labels"])}

    make_trainer(model=Anything(), train_dataset=rows(4)).train()


def test_remove_unused_columns_can_be_switched_off(make_trainer):
    def collate(batch):
        assert {"text", "weight"} < set(batch[0])
        return default_data_collator([{"x": s["x"], "labels": s["labels"]} for s in batch])

    make_trainer(train_dataset=rows(4), data_collator=collate, remove_unused_columns=False).train()


# What is said


@pytest.mark.parametrize(("dataset", "workers"), [(MapStyle, 0), (MapStyle, 2), (Stream, 0)])
def test_what_is_dropped_is_named_once_with_how_to_keep_it(make_trainer, caplog, dataset, workers):
    trainer = make_trainer(
        train_dataset=dataset(rows(8)),
        eval_dataset=rows(4),
        eval_strategy="epoch",
        num_train_epochs=2,
        max_steps=4,
        dataloader_num_workers=workers,
        log_level="info",
    )
    with caplog.at_level(logging.INFO, logger="tr_core"):
        trainer.train()
    lines = [record.getMessage() for record in caplog.records if "not arguments of the forward" in record.getMessage()]
    assert len(lines) == 1
    assert "['text', 'weight']" in lines[0]
    assert "remove_unused_columns=False" in lines[0]


def test_nothing_is_said_where_nothing_is_dropped(make_trainer, caplog):
    trainer = make_trainer(4, log_level="info")
    with caplog.at_level(logging.INFO, logger="tr_core"):
        trainer.train()
    assert "not arguments of the forward" not in caplog.text


# Labels


def test_label_names_that_the_forward_does_not_take_are_refused(make_trainer):
    message = r"label_names=\['lables'\], but the forward of Classifier takes no 'lables', only \['x', 'labels'\]"
    with pytest.raises(ValueError, match=message):
        make_trainer(label_names=["lables"])


class TwoTargets(Base):
    def forward(self, x, label_a=None, label_b=None):
        logits = self.layers(x)
        if label_a is None or label_b is None:
            return {"logits": logits}
        cross_entropy = nn.functional.cross_entropy
        return {"loss": cross_entropy(logits, label_a) + cross_entropy(logits, label_b), "logits": logits}


def test_labels_of_several_names_are_found_and_evaluated(make_trainer):
    data = [{"x": row["x"], "label_a": row["labels"], "label_b": 2 - row["labels"]} for row in samples(8)]
    trainer = make_trainer(model=TwoTargets(), train_dataset=data, eval_dataset=data)
    assert trainer.label_names == ["label_a", "label_b"]
    output = trainer.predict(data)
    assert (output.label_ids[0] + output.label_ids[1] == 2).all()
    assert "test_loss" in output.metrics
    partly = make_trainer(model=TwoTargets(), eval_dataset=data, label_names=["label_a"])
    assert isinstance(partly.predict(data).label_ids, type(output.label_ids[0]))


class Unlabelled(Base):
    """Takes no labels; its loss is computed by a function or a subclass."""

    def forward(self, x):
        return {"logits": self.layers(x)}


def cross_entropy(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs["logits"], labels)


def test_labels_of_a_loss_function_need_not_be_taken_by_the_forward(make_trainer):
    data = samples(8)
    trainer = make_trainer(
        model=Unlabelled(), eval_dataset=data, compute_loss_func=cross_entropy, label_names=["labels"]
    )
    assert "eval_loss" in trainer.evaluate()
    with pytest.raises(ValueError, match="takes no 'target'"):
        make_trainer(model=Unlabelled(), compute_loss_func=cross_entropy, label_names=["target"])


def test_labels_that_an_overridden_loss_takes_out_need_not_be_taken_by_the_forward(make_trained):
    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            target = inputs.pop("target")
            outputs = model(**inputs)
            loss = cross_entropy(outputs, target)
            return (loss, outputs) if return_outputs else loss

    data = [{"x": row["x"], "target": row["labels"]} for row in samples(8)]
    trainer = make_trained(
        trainer_class=Own, model=Unlabelled(), train_dataset=data, eval_dataset=data, label_names=["target"]
    )
    assert "eval_loss" in trainer.evaluate()


class OwnLoss(Base):
    """Gives a loss without labels, unless it is asked for none."""

    def forward(self, x, return_loss=True):
        logits = self.layers(x)
        return {"loss": logits.square().mean(), "logits": logits} if return_loss else {"logits": logits}


class NoLoss(OwnLoss):
    def forward(self, x, return_loss=False):
        return super().forward(x, return_loss)


def test_a_model_that_gives_a_loss_without_labels_is_evaluated_by_it(make_trainer):
    data = [{"x": row["x"]} for row in samples(8)]
    assert "eval_loss" in make_trainer(model=OwnLoss(), eval_dataset=data).evaluate()
    assert "eval_loss" not in make_trainer(model=NoLoss(), eval_dataset=data).evaluate()
    assert "eval_loss" in make_trainer(model=Classifier(), eval_dataset=samples(8)).evaluate()
