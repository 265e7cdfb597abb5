"""Evaluations and predictions: metrics, what is kept, and the mode of the model."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from support.callbacks import on
from support.data import samples, stack
from support.models import Classifier
from support.runs import accuracy
from torch import nn

from tr_core import Trainer, TrainerCallback
from tr_core.evaluation.output_buffer import OutputBuffer
from tr_log import Table


class Ragged(nn.Module):
    """Gives sequences whose length depends on the batch, as padded text does."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens, labels=None):
        logits = tokens.float() * self.scale
        return {"loss": logits.mean(), "logits": logits, "hidden": (logits + 1, logits[:, :1])}


def ragged(number):
    return [{"tokens": torch.full((1 + i // 4,), i), "labels": torch.full((1 + i // 4,), i)} for i in range(number)]


def assert_same_trees(one, other):
    assert type(one) is type(other)
    if isinstance(one, tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same_trees(mine, theirs)
    else:
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_the_loss_of_nine_samples_in_batches_of_eight_is_the_true_mean(make_trainer, model):
    data = samples(9)
    trainer = make_trainer(eval_dataset=data, per_device_eval_batch_size=8)
    whole = stack(data)
    expected = model(**whole)["loss"].item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_predictions_are_of_one_data_set(make_trainer):
    for data, words in (({"test": samples(2)}, r"is a dict of \['test'\]; prediction takes one"), (None, "is None")):
        with pytest.raises(TypeError, match=f"test_dataset {words}"):
            make_trainer().predict(data)


def test_a_batch_of_unknown_size_counts_no_samples(make_trainer):
    class OfNumbers(nn.Module):
        def forward(self, x, labels):
            return {"loss": x - labels}

    trainer = make_trainer(model=OfNumbers())
    output = trainer.evaluation_loop([{"x": torch.tensor(3.0), "labels": torch.tensor(1.0)}] * 3, "by hand")
    assert output.num_samples == 0
    assert np.isnan(output.metrics["eval_loss"])  # its mean would need their weights


def test_metrics_are_prefixed_once_and_numbers_are_plain(make_trainer):
    def metrics(prediction):
        return {"accuracy": np.float32(0.5), "eval_done": torch.tensor(3), "nested": {"x": np.int64(2)}}

    trainer = make_trainer(eval_dataset=samples(4), compute_metrics=metrics)
    result = trainer.evaluate()
    assert (result["eval_accuracy"], result["eval_done"], result["eval_nested"]) == (0.5, 3, {"x": 2})
    assert type(result["eval_accuracy"]) is float


def test_several_data_sets_are_evaluated_one_by_one_with_their_names(make_trainer):
    calls = []
    count = on("on_evaluate", lambda metrics, **_: calls.append(sorted(metrics)[0]))
    trainer = make_trainer(
        eval_dataset={"near": samples(4), "far": samples(6, seed=2)}, compute_metrics=accuracy, callbacks=[count]
    )
    result = trainer.evaluate()
    assert {"eval_near_accuracy", "eval_far_accuracy", "eval_near_loss", "eval_far_loss"} <= set(result)
    assert len(calls) == 2
    assert trainer.evaluate("far")["eval_loss"] == result["eval_far_loss"] != result["eval_near_loss"]


@pytest.mark.parametrize("every", [1, 2, 100])
@pytest.mark.parametrize("model_class", [Classifier, Ragged])
def test_moving_outputs_to_the_host_more_often_changes_nothing(make_trainer, model_class, every):
    torch.manual_seed(0)
    model, data = model_class(), samples(9) if model_class is Classifier else ragged(10)
    plain, moved = (
        make_trainer(model=model, per_device_eval_batch_size=2, eval_accumulation_steps=n).predict(data)
        for n in (None, every)
    )
    assert_same_trees(moved.predictions, plain.predictions)
    assert_same_trees(moved.label_ids, plain.label_ids)
    assert moved.metrics["test_loss"] == plain.metrics["test_loss"]


def test_only_the_loss_is_kept_when_nobody_looks_at_predictions(make_trainer, monkeypatch):
    kept = []
    monkeypatch.setattr(OutputBuffer, "add", lambda self, tree, flush=False: kept.append(tree))
    result = make_trainer(eval_dataset=samples(6)).evaluate()
    assert (kept, "eval_loss" in result) == ([], True)


def test_evaluation_leaves_the_model_in_the_mode_it_was_in(make_trainer, model):
    trainer = make_trainer(eval_dataset=samples(4))
    model.train()
    trainer.evaluate()
    assert model.training
    model.eval()
    trainer.evaluate()
    assert not model.training


def test_modules_that_are_frozen_in_evaluation_mode_stay_so(make_trainer, model):
    model.train()
    model.layers[2].eval()
    make_trainer(eval_dataset=samples(4)).evaluate()
    assert (model.training, model.layers[0].training, model.layers[2].training) == (True, True, False)


def test_metrics_and_events_of_an_evaluation_see_the_model_in_evaluation_mode(make_trainer, model):
    seen = []

    class Look(TrainerCallback):
        def on_evaluate(self, args, state, control, model, **kwargs):
            seen.append(model.training)

        def on_predict(self, args, state, control, model, **kwargs):
            seen.append(model.training)

    def metrics(prediction):
        seen.append(model.training)
        return {}

    model.train()
    trainer = make_trainer(eval_dataset=samples(4), compute_metrics=metrics, callbacks=[Look])
    trainer.evaluate()
    trainer.predict(samples(4))
    assert seen == [False] * 4
    assert model.training


def test_what_is_logged_to_be_drawn_goes_to_callbacks_and_is_no_metric(make_trainer):
    drawn = []

    class Look(TrainerCallback):
        def on_draw(self, args, state, control, drawings, **kwargs):
            drawn.extend(drawings)

    table = Table(["n"], [(1,)])
    trainer = make_trainer(
        eval_dataset=samples(4), compute_metrics=lambda prediction: {"f1": 0.5, "seen": table}, callbacks=[Look]
    )
    assert "eval_seen" not in trainer.evaluate()
    assert "test_seen" not in trainer.predict(samples(4)).metrics
    trainer.log({"texts": table})
    trainer.log({"own": 1, "more": table})
    assert drawn == ["eval_seen", "test_seen", "texts", "more"]
    names = [set(entry) for entry in trainer.state.log_history]
    assert names[0] > {"eval_f1", "eval_loss"}
    assert names[1:] == [{"own", "epoch", "step"}]


def test_metrics_that_fail_leave_the_model_in_training_mode_and_the_next_evaluation_works(make_trainer, model):
    answers = [RuntimeError("no such thing"), {"fine": 1}]

    def metrics(prediction):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    model.train()
    trainer = make_trainer(eval_dataset=samples(4), compute_metrics=metrics)
    with pytest.raises(RuntimeError, match="no such thing"):
        trainer.evaluate()
    assert model.training
    assert all(module.training for module in model.modules())
    assert trainer.evaluate()["eval_fine"] == 1


def test_the_context_of_evaluations_is_entered_once_for_each_and_left_after_its_events(make_trainer):
    trace = []

    class Watched(Trainer):
        @contextmanager
        def evaluation_context(self):
            trace.append("in")
            with super().evaluation_context():
                yield
            trace.append("out")

    class Ask(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics, **kwargs):
            trace.append("evaluated")
            if "nested_loss" not in metrics:
                trainer.evaluate(samples(2), metric_key_prefix="nested")

    trainer = make_trainer(trainer_class=Watched, eval_dataset={"a": samples(4), "b": samples(4)}, callbacks=[Ask()])
    trainer.evaluate()
    assert trace == ["in", "evaluated", "evaluated", "out"] * 2
    trace.clear()
    trainer.predict(samples(4))
    assert trace == ["in", "out"]
    trace.clear()
    trainer.evaluation_loop(trainer.get_test_dataloader(samples(4)), "by hand")
    assert trace == ["in", "out"]


@pytest.mark.parametrize("answer", [None, 0.5, [("accuracy", 1)]])
@pytest.mark.parametrize("by_batch", [False, True])
def test_metrics_that_are_no_dict_are_an_error(make_trainer, answer, by_batch):
    def metrics(prediction, compute_result=True):
        return answer

    trainer = make_trainer(eval_dataset=samples(4), compute_metrics=metrics, batch_eval_metrics=by_batch)
    with pytest.raises(
        TypeError, match="compute_metrics returned .*; it must return a dict of names and values"
    ) as caught:
        trainer.evaluate()
    assert not hasattr(caught.value, "__notes__")  # it is not compute_metrics that raised it


@pytest.mark.parametrize("by_batch", [False, True])
def test_an_error_of_compute_metrics_says_that_it_is_its_own(make_trainer, by_batch):
    def metrics(prediction, compute_result=True):
        return {"accuracy": prediction.preds}

    trainer = make_trainer(eval_dataset=samples(4), compute_metrics=metrics, batch_eval_metrics=by_batch)
    with pytest.raises(AttributeError, match="preds") as caught:
        trainer.evaluate()
    assert "raised by compute_metrics, whose argument has predictions, label_ids" in caught.value.__notes__[0]


def test_a_data_set_that_nobody_knows_is_an_error_that_names_those_there_are(make_trainer):
    with pytest.raises(ValueError, match="data set named 'fra'; those of this Trainer are: 'near', 'far'"):
        make_trainer(eval_dataset={"near": samples(4), "far": samples(4)}).evaluate("fra")
    with pytest.raises(ValueError, match="named 'far'; those of this Trainer are: none, as eval_dataset is not a dict"):
        make_trainer(eval_dataset=samples(4)).evaluate("far")
    with pytest.raises(ValueError, match="evaluation needs an eval_dataset; the Trainer has none and none was given"):
        make_trainer().evaluate()


def test_outputs_that_differ_beyond_the_second_dimension_are_an_error(make_trainer):
    class Attentive(Classifier):
        def forward(self, x, labels=None):
            return {**super().forward(x, labels), "attention": torch.zeros(len(x), 2, len(x))}

    trainer = make_trainer(model=Attentive(), per_device_eval_batch_size=4)
    with pytest.raises(ValueError, match=r"shape \(2, 2, 2\) in one batch .*\(\.\.\., 2, 4\) in another.*ignore_keys"):
        trainer.predict(samples(6))
    assert trainer.predict(samples(6), ignore_keys=["attention"]).predictions.shape == (6, 3)


def test_outputs_that_come_and_go_are_an_error(make_trainer):
    class Fickle(Classifier):
        def forward(self, x, labels=None):
            outputs = super().forward(x, labels)
            return {**outputs, "extra": x} if len(x) == 4 else outputs

    with pytest.raises(ValueError, match="different structures: a tuple of 2 before, a tensor now"):
        make_trainer(model=Fickle(), per_device_eval_batch_size=4).predict(samples(6))
