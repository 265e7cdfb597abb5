"""Optimizers and schedules that users give, set, edit, share and take the place of."""

import pytest
import torch
from habit_parts import RATE, Net, assert_same, at_step, batches, by_hand, logged, rows, when
from torch.optim.lr_scheduler import LambdaLR


def linear(step):
    return 1 - step / 4


# Given


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


def test_a_schedule_set_in_a_run_is_used_from_the_next_step(make_trainer):
    trainer = make_trainer()

    def change(optimizer, **_):
        trainer.lr_scheduler = LambdaLR(optimizer, lambda step: 0.5)

    trainer.add_callback(at_step(2, change))
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([RATE, RATE, RATE / 2, RATE / 2])


# Methods of a subclass


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
