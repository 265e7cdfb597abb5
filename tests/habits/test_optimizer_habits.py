"""Optimizers and schedules that users give, set, edit, share and take the place of."""

import pytest
import torch
from habit_parts import RATE, Net, assert_same, at_step, batches, by_hand, logged, rows, when
from torch.optim.lr_scheduler import LambdaLR, StepLR

from tr_core import Trainer


def sgd(model, rate=0.5):
    return torch.optim.SGD(model.parameters(), lr=rate)


def linear(step):
    return 1 - step / 4


# Given


def test_an_optimizer_that_is_given_is_used_with_the_schedule_of_the_arguments(make_trainer):
    model, other = Net(), Net()
    optimizer = sgd(model)
    trainer = make_trainer(model=model, optimizers=(optimizer, None), lr_scheduler_type="linear")
    trainer.train()
    by_hand(other, batches(rows()), rate=lambda step: 0.5 * linear(step))
    assert trainer.optimizer is optimizer
    assert_same(model, other)


def test_an_optimizer_and_a_schedule_that_are_given_are_used(make_trainer):
    model, other = Net(), Net()
    optimizer = sgd(model)
    make_trainer(model=model, optimizers=(optimizer, StepLR(optimizer, step_size=2, gamma=0.1))).train()
    by_hand(other, batches(rows()), rate=lambda step: 0.5 * 0.1 ** (step // 2))
    assert_same(model, other)


def test_a_schedule_of_another_optimizer_is_refused(make_trainer):
    model = Net()
    schedule = StepLR(sgd(model), step_size=1)
    with pytest.raises(ValueError, match="optimizer"):
        make_trainer(model=model, optimizers=(sgd(model), schedule)).train()


def test_a_schedule_given_without_its_optimizer_is_refused(make_trainer):
    model = Net()
    with pytest.raises(ValueError, match="optimizer"):
        make_trainer(model=model, optimizers=(None, StepLR(sgd(model), step_size=1))).train()


def test_an_optimizer_of_another_models_weights_is_refused(make_trainer):
    with pytest.raises(ValueError, match=r"parameter"):
        make_trainer(model=Net(), optimizers=(sgd(Net()), None)).train()


def test_an_optimizer_that_needs_a_closure_is_refused(make_trainer):
    model = Net()
    with pytest.raises((TypeError, ValueError), match="closure"):
        make_trainer(model=model, optimizers=(torch.optim.LBFGS(model.parameters()), None)).train()


def test_a_class_of_optimizers_with_its_options_is_used(make_trainer):
    trainer, other = make_trainer(optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.3})), Net()
    trainer.train()
    by_hand(other, batches(rows()), rate=0.3)
    assert_same(trainer.model, other)


def test_one_optimizer_of_two_trainers_keeps_its_momentum(make_trainer):
    model, other = Net(), Net()
    shared = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        make_trainer(model=model, optimizers=(shared, None), max_steps=2).train()
    expected = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    for batch in batches(rows())[:2] * 2:
        expected.zero_grad()
        other(**batch)["loss"].backward()
        expected.step()
    assert_same(model, other)


# Set on the Trainer


def test_an_optimizer_set_before_training_is_used(make_trainer):
    trainer, other = make_trainer(), Net()
    trainer.optimizer = sgd(trainer.model)
    trainer.train()
    by_hand(other, batches(rows()), rate=0.5)
    assert_same(trainer.model, other)


def test_an_optimizer_and_a_schedule_set_before_training_are_used(make_trainer):
    trainer, other = make_trainer(), Net()
    trainer.optimizer = sgd(trainer.model)
    trainer.lr_scheduler = LambdaLR(trainer.optimizer, linear)
    trainer.train()
    by_hand(other, batches(rows()), rate=lambda step: 0.5 * linear(step))
    assert_same(trainer.model, other)


def test_a_schedule_of_the_created_optimizer_is_used(make_trainer):
    trainer, other = make_trainer(), Net()
    trainer.lr_scheduler = LambdaLR(trainer.create_optimizer(), linear)
    trainer.train()
    by_hand(other, batches(rows()), rate=lambda step: RATE * linear(step))
    assert_same(trainer.model, other)


def test_groups_edited_after_create_optimizer_are_used(make_trainer):
    trainer, other = make_trainer(), Net()
    for group in trainer.create_optimizer().param_groups:
        group["lr"] = 0.3
    trainer.train()
    by_hand(other, batches(rows()), rate=0.3)
    assert_same(trainer.model, other)


def test_a_group_added_after_create_optimizer_is_trained(make_trainer):
    trainer, other = make_trainer(), Net()
    trainer.model.body.requires_grad_(False)
    trainer.create_optimizer()
    trainer.model.body.requires_grad_(True)
    trainer.optimizer.add_param_group({"params": list(trainer.model.body.parameters())})
    trainer.train()
    by_hand(other, batches(rows()))
    assert_same(trainer.model, other)


def test_optimizer_and_schedule_created_by_hand_with_another_length_are_used(make_trainer):
    trainer, other = make_trainer(lr_scheduler_type="linear"), Net()
    trainer.create_optimizer_and_scheduler(num_training_steps=8)
    trainer.train()
    by_hand(other, batches(rows()), rate=lambda step: RATE * (1 - step / 8))
    assert_same(trainer.model, other)


def test_a_second_run_without_setting_begins_with_an_optimizer_of_its_own(make_trainer):
    trainer, other = make_trainer(optim_args="momentum=0.9", learning_rate=0.02), Net()
    trainer.train()
    first = trainer.optimizer
    trainer.train()
    assert trainer.optimizer is not first
    for _ in range(2):
        expected = torch.optim.SGD(other.parameters(), lr=0.02, momentum=0.9)
        for batch in batches(rows()):
            expected.zero_grad()
            other(**batch)["loss"].backward()
            expected.step()
    assert_same(trainer.model, other)


def test_an_optimizer_set_in_a_run_is_refused(make_trainer):
    trainer = make_trainer()
    trainer.add_callback(at_step(2, lambda model, **_: setattr(trainer, "optimizer", sgd(model))))
    with pytest.raises(RuntimeError, match=r"trainer\.optimizer was assigned while training.*call its add_param_group"):
        trainer.train()


def test_a_schedule_set_in_a_run_is_used_from_the_next_step(make_trainer):
    trainer = make_trainer()

    def change(optimizer, **_):
        trainer.lr_scheduler = LambdaLR(optimizer, lambda step: 0.5)

    trainer.add_callback(at_step(2, change))
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([RATE, RATE, RATE / 2, RATE / 2])


# Methods of a subclass


def test_an_overridden_create_optimizer_with_groups_of_its_own_rates_is_used(make_trainer):
    class Own(Trainer):
        def create_optimizer(self, model=None):
            if self.optimizer is None:
                groups = [
                    {"params": self.model.body.parameters(), "lr": 0.01},
                    {"params": self.model.head.parameters()},
                ]
                self.optimizer = torch.optim.SGD(groups, lr=0.5)
            return self.optimizer

    trainer, other = make_trainer(Own, lr_scheduler_type="linear"), Net()
    trainer.train()
    for step, batch in enumerate(batches(rows())):
        other.zero_grad()
        other(**batch)["loss"].backward()
        with torch.no_grad():
            for part, rate in ((other.body, 0.01), (other.head, 0.5)):
                for parameter in part.parameters():
                    parameter -= rate * linear(step) * parameter.grad
    assert_same(trainer.model, other)


def test_an_overridden_create_scheduler_is_used(make_trainer):
    class Own(Trainer):
        def create_scheduler(self, num_training_steps, optimizer=None):
            self.lr_scheduler = StepLR(self.optimizer if optimizer is None else optimizer, 1, gamma=0.5)
            return self.lr_scheduler

    trainer = make_trainer(Own)
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([0.1, 0.05, 0.025, 0.0125])


def test_an_override_that_builds_nothing_is_refused(make_trainer):
    class Forgets(Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps):
            pass

    with pytest.raises(ValueError, match="left self.optimizer or self.lr_scheduler None; it must set both"):
        make_trainer(Forgets).train()


def test_an_optimizer_step_of_ones_own_is_the_step(make_trainer):
    calls = []

    class Counts(torch.optim.SGD):
        def step(self, closure=None):
            calls.append(1)
            return super().step(closure)

    model = Net()
    make_trainer(model=model, optimizers=(Counts(model.parameters(), lr=RATE), None)).train()
    assert len(calls) == 4


def test_hooks_of_an_optimizer_are_called(make_trainer):
    calls, trainer = [], make_trainer()
    trainer.add_callback(
        when(on_train_begin=lambda optimizer, **_: optimizer.register_step_pre_hook(lambda *_: calls.append(1)))
    )
    trainer.train()
    assert len(calls) == 4


# In a run


def test_momentum_cleared_by_a_callback_is_gone(make_trainer):
    def clear(optimizer, **_):
        optimizer.state.clear()

    trainer = make_trainer(optim_args="momentum=0.9", learning_rate=0.02, callbacks=[at_step(2, clear)])
    trainer.train()
    other = Net()
    for half in (batches(rows())[:2], batches(rows())[2:]):
        expected = torch.optim.SGD(other.parameters(), lr=0.02, momentum=0.9)
        for batch in half:
            expected.zero_grad()
            other(**batch)["loss"].backward()
            expected.step()
    assert_same(trainer.model, other)


def test_a_group_added_in_a_run_is_trained_from_the_next_step_by_the_same_schedule(make_trainer):
    trainer, other = make_trainer(lr_scheduler_type="linear"), Net()
    trainer.model.body.requires_grad_(False)

    def thaw(model, optimizer, **_):
        model.body.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.body.parameters()), "lr": 0.05})

    trainer.add_callback(at_step(2, thaw))
    trainer.train()
    other.body.requires_grad_(False)
    by_hand(other, batches(rows())[:2], rate=lambda step: RATE * linear(step))
    other.body.requires_grad_(True)
    for step, batch in enumerate(batches(rows())[2:], start=2):
        other.zero_grad()
        other(**batch)["loss"].backward()
        with torch.no_grad():
            # The group's own rate until the schedule is stepped, and from then on its share of it.
            for part, rate in (
                (other.body, 0.05 if step == 2 else 0.05 * linear(step)),
                (other.head, RATE * linear(step)),
            ):
                for parameter in part.parameters():
                    parameter -= rate * parameter.grad
    assert_same(trainer.model, other)


class ScheduleFree(torch.optim.SGD):
    """Has weights to train and others to judge, as optimizers without a schedule have."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=RATE)
        self.calls = []

    def train(self):
        self.calls.append("train")

    def eval(self):
        self.calls.append("eval")


def test_an_optimizer_with_two_sets_of_weights_is_switched_around_an_evaluation(make_trainer):
    model = Net()
    optimizer = ScheduleFree(model.parameters())
    make_trainer(
        model=model, optimizers=(optimizer, None), eval_dataset=rows(4), eval_strategy="steps", eval_steps=2
    ).train()
    changes = [call for call, before in zip(optimizer.calls, [None, *optimizer.calls], strict=False) if call != before]
    assert changes[:4] == ["train", "eval", "train", "eval"]


@pytest.mark.parametrize("name", ["adamw_torch", "adafactor", "sgd"])
def test_the_optimizer_of_the_arguments_changed_between_two_runs_is_that_of_the_second(make_trainer, name):
    trainer = make_trainer(optim="rmsprop")
    trainer.train()
    trainer.args.optim = name
    trainer.train()
    assert type(trainer.optimizer).__name__.lower() == name.removesuffix("_torch")
