"""A loss that an override of `compute_loss` divides by the accumulation itself is not divided again."""

import pytest
import torch
from support.data import samples
from support.models import Base, CountedSum
from support.runs import log_of
from torch import nn

from tr_core import Trainer

ROWS, BATCH, ACCUMULATION = 10, 2, 4  # two steps: of 4 micro-batches, and of 1


class Mean(Base):
    def forward(self, x, labels=None):
        logits = self.layers(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Plain(Trainer):
    """Its loss is a mean."""

    calls = 0
    divisor = 1

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls += 1
        outputs = model(**dict(inputs))
        loss = outputs["loss"] / self.divisor
        return (loss, outputs) if return_outputs else loss


class Divides(Plain):
    @property
    def divisor(self):
        return self.current_gradient_accumulation_steps


class Reads(Plain):
    """It reads the number and does not divide by it."""

    @property
    def divisor(self):
        return self.current_gradient_accumulation_steps**0


class Half(Plain):
    @property
    def divisor(self):
        return self.current_gradient_accumulation_steps**0.5


class Takes(Plain):
    """Its batches are taken apart while the loss is computed."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return super().compute_loss(model, {**inputs, "labels": labels}) / self.current_gradient_accumulation_steps


def function(outputs, labels, num_items_in_batch=None):
    raise AssertionError("the override does not call it")


def build(make_trainer, trainer_class, model=Mean, **options):
    options = {"learning_rate": 0.1, "optim": "sgd", "max_grad_norm": 0.0, "logging_steps": 1} | options
    torch.manual_seed(1)
    return make_trainer(
        trainer_class=trainer_class,
        model=model(),
        train_dataset=samples(ROWS),
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=ACCUMULATION,
        num_train_epochs=2,
        **options,
    )


def trained(make_trainer, trainer_class, **options):
    trainer = build(make_trainer, trainer_class, **options)
    trainer.train()
    return [p.detach().clone() for p in trainer.model.parameters()], log_of(trainer, "loss"), trainer.calls


@pytest.mark.parametrize("given", [None, function], ids=["no-function", "function"])
@pytest.mark.parametrize("trainer_class", [Divides, Reads, Takes])
def test_a_loss_is_divided_once_whoever_divides(make_trainer, trainer_class, given):
    weights, losses, calls = trained(make_trainer, Plain, compute_loss_func=given)
    assert calls == 2 * (ROWS // BATCH)  # who reads nothing is not looked at
    own = trained(make_trainer, trainer_class, compute_loss_func=given)
    torch.testing.assert_close(own[0], weights, rtol=1e-5, atol=1e-7)
    assert own[1] == pytest.approx(losses, rel=1e-5)


def test_an_earlier_library_says_with_a_function_that_is_none_that_it_divides(make_trainer):
    class Says(Divides):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.compute_loss_func = "not None: compute_loss divides"

    weights, losses, _ = trained(make_trainer, Plain)
    own = trained(make_trainer, Says)
    torch.testing.assert_close(own[0], weights, rtol=1e-5, atol=1e-7)
    with pytest.raises(TypeError, match=r"compute_loss_func = 'mean' is a str; it must be a function"):
        build(make_trainer, Trainer, compute_loss_func="mean").train()


def test_what_a_function_that_is_none_says_ends_with_it(make_trainer):
    trainer = build(make_trainer, Divides, compute_loss_func="not None: compute_loss divides")
    trainer.train()
    assert (trainer.calls, trainer.loss_rule.divides_itself) == (2 * (ROWS // BATCH), True)
    trainer.compute_loss_func = None
    assert (trainer.loss_is_scaled_for_ga, trainer.loss_rule.divides_itself) == (None, None)


def test_a_declaration_that_is_taken_back_in_a_run_leaves_the_loss_to_be_looked_at(make_trainer):
    class TakesBack(Divides):
        loss_is_scaled_for_ga = True

        def training_step(self, *given):
            loss = super().training_step(*given)
            self.loss_is_scaled_for_ga = None
            return loss

    weights, losses, _ = trained(make_trainer, Plain)
    own = trained(make_trainer, TakesBack)
    torch.testing.assert_close(own[0], weights, rtol=1e-5, atol=1e-7)
    assert own[1] == pytest.approx(losses, rel=1e-5)


def test_looking_leaves_dropout_as_it_is(make_trainer):
    class Drops(Mean):
        def forward(self, x, labels=None):
            return super().forward(nn.functional.dropout(x, 0.5, self.training), labels)

    weights, _, _ = trained(make_trainer, Plain, model=Drops)
    own, _, _ = trained(make_trainer, Divides, model=Drops)
    torch.testing.assert_close(own, weights, rtol=1e-5, atol=1e-7)


def test_a_loss_that_is_divided_in_part_is_refused(make_trainer):
    with pytest.raises(
        ValueError, match=r"whether it divides the loss by that cannot be seen.*with 4, .*with 8\. Set loss_is"
    ):
        build(make_trainer, Half).train()


def test_a_loss_that_is_divided_by_both_is_refused(make_trainer):
    class Both(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
            return loss / self.current_gradient_accumulation_steps

    with pytest.raises(ValueError, match="or it does and divides by num_items_in_batch too"):
        build(make_trainer, Both, model=CountedSum).train()


@pytest.mark.parametrize("scaled", [True, False])
def test_a_declaration_is_not_looked_behind(make_trainer, scaled):
    trainer = build(make_trainer, type("Declares", (Divides,), {"loss_is_scaled_for_ga": scaled}))
    trainer.train()
    assert trainer.calls == 2 * (ROWS // BATCH)


def test_a_loss_of_zero_with_gradients_is_refused_until_it_is_declared(make_trainer):
    class Zero(Divides):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = super().compute_loss(model, inputs)
            return loss - loss.detach()

    with pytest.raises(ValueError, match="loss of this micro-batch is 0 and its gradients are not"):
        build(make_trainer, Zero).train()
