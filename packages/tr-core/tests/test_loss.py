"""What a loss is divided by, what a user declares about it, and the loss of smoothed labels."""

from types import SimpleNamespace

import pytest
import torch
from support.data import samples
from support.models import Base, CountedSum, IgnoresCount
from support.runs import first_gradient
from torch import nn

from tr_core import Trainer
from tr_core.label_smoothing import LabelSmoother
from tr_core.loss import split_loss

MODELS = {"mean": IgnoresCount, "counted": CountedSum}


@pytest.mark.parametrize("kind", MODELS)
def test_one_batch_of_n_and_n_batches_of_one_give_the_same_step(make_trainer, kind):
    """A forward with **kwargs that ignores the count gets a loss N times too large from the reference."""
    whole, whole_loss = first_gradient(make_trainer, MODELS[kind](), 1, 8)
    parts, parts_loss = first_gradient(make_trainer, MODELS[kind](), 8, 1)
    assert whole_loss == pytest.approx(parts_loss, rel=1e-6)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_loss_function_without_a_count_parameter_works(make_trainer):
    def loss_function(outputs, labels):
        return nn.functional.cross_entropy(outputs["logits"], labels)

    grads, loss = first_gradient(make_trainer, IgnoresCount(), 2, 4, compute_loss_func=loss_function)
    assert loss > 0
    assert len(grads) == 4


def test_a_compute_loss_from_before_the_count_existed_works_unchanged(make_trained):
    class Weighted(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            weights = torch.tensor([1.0, 2.0, 3.0])
            loss = nn.functional.cross_entropy(outputs.get("logits"), labels, weight=weights)
            return (loss, outputs) if return_outputs else loss

    trainer = make_trained(8, Weighted, eval_dataset=samples(4), eval_strategy="epoch", gradient_accumulation_steps=2)
    assert any("eval_loss" in entry for entry in trainer.state.log_history)


def test_a_training_step_from_before_the_count_existed_works_unchanged(make_trainer):
    calls = []

    class Old(Trainer):
        def training_step(self, model, inputs):
            calls.append(len(inputs["x"]))
            return super().training_step(model, inputs)

    make_trainer(10, Old).train()
    assert calls == [4, 4, 2]


def test_smoothed_labels_act_in_training_and_evaluation_and_do_not_depend_on_accumulation(make_trainer):
    plain = first_gradient(make_trainer, IgnoresCount(), 1, 8)[1]
    results = [first_gradient(make_trainer, IgnoresCount(), n, 8 // n, label_smoothing_factor=0.3) for n in (1, 4)]
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)
    assert abs(results[0][1] - plain) > 1e-3
    trainer = make_trainer(8, model=Base(), label_smoothing_factor=0.3, eval_dataset=samples(4))
    with pytest.raises(ValueError, match="label_smoothing_factor needs a batch with 'labels'"):
        trainer.loss_function({"logits": torch.ones(1, 3)}, None)


def test_outputs_in_a_tuple_are_all_kept_where_the_loss_is_computed_outside(make_trainer):
    class OnlyLogits(Base):
        def forward(self, x, labels=None):
            return (self.layers(x),)

    output = make_trainer(8, model=OnlyLogits(), label_smoothing_factor=0.1).predict(samples(5))
    assert output.predictions.shape == (5, 3)
    assert output.metrics["test_loss"] > 0


def test_smoothing_labels_of_several_a_sample_is_refused(make_trainer):
    model = IgnoresCount()
    model.config = SimpleNamespace(problem_type="multi_label_classification")
    with pytest.raises(ValueError, match=r"label_smoothing_factor=0.1 has no meaning for problem_type='multi_label"):
        make_trainer(8, model=model, label_smoothing_factor=0.1)


# Smoothed labels


LOGITS = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([[1, 2, -100, 0, 6], [3, -100, -100, 5, 4]])


def smoothed_by_hand(logits, labels, epsilon):
    total, count = 0.0, 0
    for row, label in zip(logits.reshape(-1, 7).double(), labels.reshape(-1).tolist(), strict=True):
        if label != -100:
            log_p = row.log_softmax(0)
            total += float(-(1 - epsilon) * log_p[label] - epsilon * log_p.mean())
            count += 1
    return total, count


def test_low_precision_is_computed_in_float32():
    low = LOGITS.to(torch.bfloat16)
    total, count = smoothed_by_hand(low, LABELS, 0.1)
    found = LabelSmoother(0.1, nn.Linear(1, 1))({"logits": low}, LABELS)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(total / count, rel=1e-6)


# What a user declares


def setting(name, value, how):
    """Return a Trainer that declares something: in its class, in its constructor, or when training begins."""
    if how == "class":
        return type("Declares", (Trainer,), {name: value})

    class Declares(Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if how == "constructor":
                setattr(self, name, value)

        def train(self, *args, **kwargs):
            if how == "later":
                setattr(self, name, value)
            return super().train(*args, **kwargs)

    return Declares


HOW = ["class", "constructor", "later"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("model", "value", "factor"), [(IgnoresCount, True, 4), (CountedSum, False, 1 / 4)])
def test_a_loss_that_is_said_to_be_scaled_is_used_as_it_is_and_else_divided(make_trainer, how, model, value, factor):
    plain = first_gradient(make_trainer, model(), 4, 2)
    said = first_gradient(make_trainer, model(), 4, 2, trainer_class=setting("loss_is_scaled_for_ga", value, how))
    assert said[1] == pytest.approx(plain[1] * factor, rel=1e-5)
    for one, other in zip(plain[0], said[0], strict=True):
        torch.testing.assert_close(one * factor, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("how", HOW)
def test_a_model_that_is_said_not_to_take_the_count_is_not_given_it(make_trainer, how):
    given = []

    class Watches(CountedSum):
        def forward(self, x, labels=None, num_items_in_batch=None):
            given.append(num_items_in_batch)
            return super().forward(x, labels, num_items_in_batch)

    trainer_class = setting("model_accepts_loss_kwargs", False, how)
    said = first_gradient(make_trainer, Watches(), 4, 2, trainer_class=trainer_class)
    assert given == [None] * 4
    assert said[1] == pytest.approx(first_gradient(make_trainer, Watches(), 4, 2)[1], rel=1e-5)
    assert given[-1] is not None


@pytest.mark.parametrize("how", HOW)
def test_a_subclass_may_ask_for_the_count_and_divide_by_it(make_trainer, how):
    class Divides(setting("model_accepts_loss_kwargs", True, how)):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(inputs["x"])
            loss = nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="sum")
            return loss / num_items_in_batch

    class NeverTold(IgnoresCount):
        accepts_loss_kwargs = None

        def forward(self, x, labels=None):
            return super().forward(x, labels)

    plain = first_gradient(make_trainer, NeverTold(), 1, 8)
    assert first_gradient(make_trainer, NeverTold(), 4, 2, trainer_class=Divides)[1] == pytest.approx(
        plain[1], rel=1e-5
    )


def test_a_loss_that_is_said_to_be_divided_and_is_not_is_refused(make_trainer):
    trainer_class = setting("model_accepts_loss_kwargs", True, "constructor")
    with pytest.raises(ValueError, match="model_accepts_loss_kwargs=True was set.*the loss does not depend on it"):
        first_gradient(make_trainer, IgnoresCount(), 4, 2, trainer_class=trainer_class)
    first_gradient(make_trainer, IgnoresCount(), 1, 8, trainer_class=trainer_class)


def test_what_is_said_can_be_read(make_trainer):
    trainer = make_trainer(8, model=CountedSum())
    assert trainer.model_accepts_loss_kwargs is True
    assert trainer.loss_is_scaled_for_ga is None
    trainer.model_accepts_loss_kwargs = False
    assert trainer.model_accepts_loss_kwargs is False
    assert make_trainer(8).model_accepts_loss_kwargs is False


class OverSamples(CountedSum):
    """Returns a mean over samples, each a mean over its own targets, though it could take the count."""

    def forward(self, x, labels=None, num_items_in_batch=None):
        logits = self.layers(x)
        losses = nn.functional.cross_entropy(
            logits[:, None].expand(-1, labels.shape[1], -1).transpose(1, 2), labels, reduction="none"
        )
        known = labels != -100
        loss = ((losses * known).sum(1) / known.sum(1)).mean()
        return {"loss": loss, "logits": logits}


def sparse_samples(number):
    rows = samples(number)
    for index, row in enumerate(rows):
        row["labels"] = torch.tensor([index % 3, *([(index + 1) % 3 if index % 2 else -100] * 3)])
    return rows


@pytest.mark.parametrize("trains_first", [False, True])
@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("batch_size", [1, 3, 7])
def test_an_evaluation_counts_batches_by_what_their_loss_is_divided_by(make_trainer, trains_first, divides, batch_size):
    class OverTargets(OverSamples):
        def forward(self, x, labels=None, num_items_in_batch=None):
            logits = self.layers(x)
            repeated = logits[:, None].expand(-1, labels.shape[1], -1).transpose(1, 2)
            loss = nn.functional.cross_entropy(repeated, labels, reduction="sum")
            return {"loss": loss / num_items_in_batch, "logits": logits}

    rows = sparse_samples(7)
    trainer = make_trainer(
        model=(OverTargets if divides else OverSamples)(),
        train_dataset=rows,
        eval_dataset=rows,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=2,
    )
    if trains_first:
        trainer.train()
    x, labels = torch.stack([row["x"] for row in rows]), torch.stack([row["labels"] for row in rows])
    with torch.no_grad():
        wanted = trainer.model.eval()(x, labels, (labels != -100).sum())["loss"].item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)


def test_perplexity_of_a_loss_that_is_no_mean_over_tokens_is_refused(make_trainer):
    trainer = make_trainer(model=OverSamples(), eval_dataset=sparse_samples(5), eval_perplexity=True)
    with pytest.raises(ValueError, match="eval_perplexity=True needs a mean over tokens.*does not depend on num_items"):
        trainer.evaluate()


def test_numbers_beside_a_loss_keep_all_their_digits():
    loss, parts = split_loss({"loss": torch.tensor(1.0), "share": 0.1, "count": 2**53 - 1, "own": torch.tensor([0.5])})
    assert loss.item() == 1.0
    assert {name: value.item() for name, value in parts.items()} == {"share": 0.1, "count": 2**53 - 1, "own": 0.5}
