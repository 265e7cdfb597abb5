"""What a user declares about a loss: model_accepts_loss_kwargs and loss_is_scaled_for_ga of the Trainer."""

import pytest
import torch
from small_models import CountedSum, IgnoresCount, samples
from test_loss import first_gradient
from torch import nn

from tr_core import Trainer


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
    told = []

    class Watches(CountedSum):
        def forward(self, x, labels=None, num_items_in_batch=None):
            told.append(num_items_in_batch)
            return super().forward(x, labels, num_items_in_batch)

    trainer_class = setting("model_accepts_loss_kwargs", False, how)
    said = first_gradient(make_trainer, Watches(), 4, 2, trainer_class=trainer_class)
    assert told == [None] * 4
    assert said[1] == pytest.approx(first_gradient(make_trainer, Watches(), 4, 2)[1], rel=1e-5)
    assert told[-1] is not None


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


def reading(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum") / int(num_items_in_batch)


def test_an_evaluation_that_cannot_be_weighed_is_refused_only_where_it_matters(make_trainer):
    class Repeats(IgnoresCount):
        def forward(self, x, labels=None, **kwargs):
            return {"logits": self.layers(x)[:, None].expand(-1, 4, -1).transpose(1, 2)}

    options = {"compute_loss_func": reading, "per_device_eval_batch_size": 2}
    trainer = make_trainer(model=Repeats(), eval_dataset=sparse_samples(7)[:5], **options)
    with pytest.raises(ValueError, match="cannot be seen: num_items_in_batch was read as a number"):
        trainer.evaluate()
    even = [row | {"labels": row["labels"].clamp(min=0)} for row in sparse_samples(7)]
    assert make_trainer(model=Repeats(), eval_dataset=even, **options).evaluate()["eval_loss"] > 0


def test_perplexity_of_a_loss_that_is_no_mean_over_tokens_is_refused(make_trainer):
    trainer = make_trainer(model=OverSamples(), eval_dataset=sparse_samples(5), eval_perplexity=True)
    with pytest.raises(ValueError, match="eval_perplexity=True needs a mean over tokens.*does not depend on num_items"):
        trainer.evaluate()
