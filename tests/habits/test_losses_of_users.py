"""What `compute_loss`, `training_step` and models of users return and do to their inputs."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from habit_parts import RATE, Net, assert_same, batches, by_hand, logged, rows
from torch import nn

from tr_core import Trainer


def with_loss(function):
    """Make a class of Trainers whose `compute_loss` is a function of Trainer, model and inputs."""

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss = function(self, model, inputs)
            return (loss, {"logits": model(inputs["x"])["logits"]}) if return_outputs else loss

    return Own


def error(model, inputs):
    return model(inputs["x"])["logits"] - inputs["labels"]


# What a loss may be


def test_a_loss_of_shape_one_trains_and_is_logged_as_a_number(make_trainer):
    trainer, other = (
        make_trainer(with_loss(lambda self, model, inputs: error(model, inputs).square().mean()[None])),
        Net(),
    )
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))
    assert_same(trainer.model, other)


REFUSED_LOSSES = {
    "a loss for each sample": (lambda self, model, inputs: error(model, inputs).square(), "only for scalar outputs"),
    "a number": (lambda self, model, inputs: error(model, inputs).square().mean().item(), "float"),
    "a loss without a graph": (
        lambda self, model, inputs: error(model, inputs).square().mean().detach(),
        "does not require grad",
    ),
    "nothing": (lambda self, model, inputs: None, "NoneType"),
    "a pair": (lambda self, model, inputs: (error(model, inputs).square().mean(), None), "tuple"),
    "whole numbers": (lambda self, model, inputs: torch.tensor(3), "does not require grad"),
}


@pytest.mark.parametrize("name", REFUSED_LOSSES)
def test_a_loss_that_cannot_be_trained_is_refused(make_trainer, name):
    function, words = REFUSED_LOSSES[name]
    with pytest.raises((RuntimeError, TypeError, ValueError), match=words):
        make_trainer(with_loss(function)).train()


def test_a_loss_in_double_precision_trains(make_trainer):
    trainer, other = (
        make_trainer(with_loss(lambda self, model, inputs: error(model, inputs).double().square().mean())),
        Net(),
    )
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))
    assert_same(trainer.model, other)


def test_a_loss_that_is_not_a_number_is_logged_as_it_is(make_trainer):
    trainer = make_trainer(with_loss(lambda self, model, inputs: error(model, inputs).square().mean() * torch.nan))
    trainer.train()
    assert all(value != value for value in logged(trainer))


def test_parts_of_a_loss_are_logged_beside_it(make_trainer):
    def parts(self, model, inputs):
        square = error(model, inputs).square().mean()
        return {"loss": square, "twice": 2 * square.detach()}

    trainer, other = make_trainer(with_loss(parts)), Net()
    trainer.train()
    expected = by_hand(other, batches(rows()))
    assert logged(trainer) == pytest.approx(expected)
    assert logged(trainer, "twice") == pytest.approx([2 * value for value in expected])


# What is done in one


def test_outputs_kept_by_compute_loss_are_those_of_the_last_batch(make_trainer):
    def keep(self, model, inputs):
        self.kept = model(**inputs)
        return self.kept["loss"]

    trainer = make_trainer(with_loss(keep))
    trainer.train()
    assert trainer.kept["loss"].item() == pytest.approx(logged(trainer)[-1])


def test_labels_taken_out_of_the_inputs_are_there_for_the_metrics(make_trainer):
    class Pops(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = nn.functional.mse_loss(outputs["logits"], labels)
            return (loss, outputs) if return_outputs else loss

    seen = []
    trainer = make_trainer(Pops, eval_dataset=rows(4), compute_metrics=lambda p: seen.append(p.label_ids) or {})
    trainer.train()
    trainer.evaluate()
    other = Net()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))
    assert seen[0] == pytest.approx(torch.stack([row["labels"] for row in rows(4)]).numpy())


def test_inputs_changed_in_place_leave_the_data_as_it_is(make_trainer):
    def scale(self, model, inputs):
        inputs["x"].mul_(2)
        inputs["labels"] += 1
        return model(**inputs)["loss"]

    data = rows()
    trainer, other = make_trainer(with_loss(scale), train_dataset=data, max_steps=8), Net()
    trainer.train()
    changed = [{"x": 2 * batch["x"], "labels": batch["labels"] + 1} for batch in batches(rows())]
    assert logged(trainer) == pytest.approx(by_hand(other, changed * 2))
    assert all(torch.equal(row["x"], before["x"]) for row, before in zip(data, rows(), strict=True))


def test_a_teacher_within_compute_loss_is_not_trained(make_trainer):
    teacher = Net(seed=5)

    def distil(self, model, inputs):
        with torch.no_grad():
            wanted = teacher(inputs["x"])["logits"]
        return nn.functional.mse_loss(model(inputs["x"])["logits"], wanted)

    trainer, other = make_trainer(with_loss(distil)), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows()), loss=lambda m, b: distil(None, m, b)))
    assert_same(teacher, Net(seed=5))
    assert_same(trainer.model, other)


def test_entries_logged_in_compute_loss_are_in_the_history_beside_those_of_the_steps(make_trainer):
    def log(self, model, inputs):
        self.log({"mine": 1.0})
        return model(**inputs)["loss"]

    trainer = make_trainer(with_loss(log))
    trainer.train()
    assert len(logged(trainer, "mine")) == 4
    assert len(logged(trainer)) == 4


def test_a_model_put_into_evaluation_mode_by_compute_loss_trains_in_training_mode(make_trainer):
    modes = []

    def look(self, model, inputs):
        modes.append(model.training)
        loss = model(**inputs)["loss"]
        model.eval()
        return loss

    make_trainer(with_loss(look), gradient_accumulation_steps=2, max_steps=2).train()
    assert modes == [True] * 4


LOOKS = {
    "printing": lambda count: f"{count}",
    "int": int,
    "item": lambda count: count.item(),
    "comparing": lambda count: bool(count > 0),
    "keeping": lambda count: [count],
}


@pytest.mark.parametrize("name", LOOKS)
def test_looking_at_the_count_of_targets_leaves_the_loss_a_mean(make_trainer, name):
    class Looks(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            if num_items_in_batch is not None:
                LOOKS[name](num_items_in_batch)
            return super().compute_loss(model, inputs, return_outputs)

    def loss_of(outputs, labels, num_items_in_batch=None):
        if num_items_in_batch is not None:
            LOOKS[name](num_items_in_batch)
        return nn.functional.mse_loss(outputs["logits"], labels)

    first, second, third, fourth = batches(rows())
    for parts in ({"trainer_class": Looks}, {"compute_loss_func": loss_of}):
        trainer, other = make_trainer(**parts, gradient_accumulation_steps=2, max_steps=2), Net()
        trainer.train()
        assert logged(trainer) == pytest.approx(by_hand(other, [[first, second], [third, fourth]]))


def test_a_sum_divided_by_the_count_is_the_mean_over_the_step(make_trainer):
    def summed(outputs, labels, num_items_in_batch=None):
        return (outputs["logits"] - labels).square().sum() / num_items_in_batch

    trainer, other = make_trainer(compute_loss_func=summed, gradient_accumulation_steps=2, max_steps=2), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows(), 4)))
    assert_same(trainer.model, other)


def test_compute_loss_without_return_outputs_trains_and_evaluations_say_what_is_missing(make_trainer):
    class Short(Trainer):
        def compute_loss(self, model, inputs):
            return model(**inputs)["loss"]

    trainer, other = make_trainer(Short, eval_dataset=rows(4)), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))
    with pytest.raises(TypeError, match="return_outputs"):
        trainer.evaluate()


# training_step


def test_training_step_with_its_own_backward_is_what_trains(make_trainer):
    class Own(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, inputs)
            (loss * 0.5).backward()
            return loss.detach()

    trainer, other = make_trainer(Own), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows()), rate=RATE / 2))
    assert_same(trainer.model, other)


def test_training_step_that_trains_on_disturbed_weights_adds_both_gradients(make_trainer):
    class Adversarial(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = super().training_step(model, inputs)
            with torch.no_grad():
                model.head.bias += 0.1
            super().training_step(model, inputs)
            with torch.no_grad():
                model.head.bias -= 0.1
            return loss

    def both(model, batch):
        first = model(**batch)["loss"]
        moved = model(batch["x"])["logits"] + 0.1
        return first + nn.functional.mse_loss(moved, batch["labels"])

    trainer, other = make_trainer(Adversarial), Net()
    trainer.train()
    by_hand(other, batches(rows()), loss=both)
    assert_same(trainer.model, other)


# What models return


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


Named = namedtuple("Named", ["loss", "logits"])


def as_tuple(outputs):
    return tuple(outputs.values())


def as_loss(outputs):
    return outputs["loss"]


KINDS = {
    "tuple": as_tuple,
    "dataclass": lambda outputs: Output(**outputs),
    "named tuple": lambda outputs: Named(**outputs),
    "loss alone": as_loss,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_may_return_a_tuple_a_dataclass_or_its_loss(make_trainer, kind):
    class Model(Net):
        def forward(self, x, labels=None):
            return KINDS[kind](super().forward(x, labels))

    trainer, other = make_trainer(model=Model()), Net()
    trainer.train()
    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows())))


def test_a_model_that_returns_no_loss_is_refused_with_what_it_returned(make_trainer):
    class Model(Net):
        def forward(self, x, labels=None):
            return {"logits": super().forward(x)["logits"]}

    with pytest.raises(ValueError, match=r"holds no loss, only \['logits'\].*override compute_loss"):
        make_trainer(model=Model()).train()
