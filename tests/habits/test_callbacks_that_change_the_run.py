"""What callbacks of users change while a run goes on: modes, rates, gradients, weights, random numbers, arguments."""

import numpy as np
import pytest
import torch
from habit_parts import RATE, Net, assert_same, at_step, batches, by_hand, logged, rows, when
from torch import nn


class Modes(Net):
    """Notes for every forward whether it was in training mode."""

    def __init__(self, **options):
        super().__init__(**options)
        self.modes = []

    def forward(self, x, labels=None):
        self.modes.append((self.training, self.dropout.training))
        return super().forward(x, labels)


# The mode of the model


def test_a_model_left_in_evaluation_mode_by_a_callback_trains_in_training_mode(make_trainer):
    model = Modes(dropout=0.5)

    def sample(model, **_):
        model.eval()
        with torch.no_grad():
            Net.forward(model, rows(1)[0]["x"][None])

    make_trainer(model=model, callbacks=[when(on_step_end=sample)]).train()
    assert model.modes == [(True, True)] * 4


def test_samples_drawn_in_on_log_leave_the_next_step_in_training_mode(make_trainer):
    model = Modes(dropout=0.5)
    texts = []

    def sample(model, **_):
        model.eval()
        with torch.no_grad():
            texts.append(Net.forward(model, torch.ones(1, 4))["logits"].item())

    make_trainer(model=model, callbacks=[when(on_log=sample)], max_steps=3).train()
    assert model.modes == [(True, True)] * 3
    assert len(set(texts[:3])) == 3


def test_a_layer_put_into_evaluation_mode_in_every_step_stays_so(make_trainer):
    model = Modes(dropout=0.5)
    freeze = when(on_step_begin=lambda model, **_: model.dropout.eval())
    other = Net()
    make_trainer(model=model, callbacks=[freeze]).train()
    assert model.modes == [(True, False)] * 4
    by_hand(other, batches(rows()))
    assert_same(model, other)


def test_gradients_switched_off_by_a_callback_are_not_a_run_that_learns_nothing(make_trainer):
    trainer = make_trainer(callbacks=[at_step(1, lambda **_: torch.set_grad_enabled(False))])
    try:
        with pytest.raises(RuntimeError, match="grad"):
            trainer.train()
    finally:
        torch.set_grad_enabled(True)


# Rates


def test_a_rate_set_at_the_end_of_a_step_is_that_of_the_next_and_is_logged(make_trainer):
    def lower(optimizer, **_):
        for group in optimizer.param_groups:
            group["lr"] = 0.01

    trainer, other = make_trainer(callbacks=[at_step(2, lower)]), Net()
    trainer.train()
    by_hand(other, batches(rows()), rate=lambda step: 0.01 if step == 2 else RATE)
    assert logged(trainer, "learning_rate") == pytest.approx([RATE, RATE, 0.01, RATE])  # the schedule sets it again
    assert_same(trainer.model, other)


def test_a_rate_set_before_every_step_is_that_of_every_step(make_trainer):
    def decay(optimizer, state, **_):
        for group in optimizer.param_groups:
            group["lr"] = RATE / (1 + state.global_step)

    trainer, other = make_trainer(callbacks=[when(on_step_begin=decay)]), Net()
    trainer.train()
    by_hand(other, batches(rows()), rate=lambda step: RATE / (1 + step))
    assert logged(trainer, "learning_rate") == pytest.approx([RATE / step for step in (1, 2, 3, 4)])
    assert_same(trainer.model, other)


def test_base_rates_of_the_schedule_changed_by_a_callback_last(make_trainer):
    def lower(lr_scheduler, **_):
        lr_scheduler.base_lrs = [0.01 for _ in lr_scheduler.base_lrs]

    trainer, other = make_trainer(callbacks=[at_step(1, lower)]), Net()
    trainer.train()
    rates = logged(trainer, "learning_rate")
    assert rates == pytest.approx([RATE, RATE, 0.01, 0.01])  # the schedule had set the second before
    by_hand(other, batches(rows()), rate=lambda step: rates[step])
    assert_same(trainer.model, other)


def test_a_schedule_stepped_by_a_callback_is_one_step_ahead(make_trainer):
    trainer = make_trainer(
        lr_scheduler_type="linear", callbacks=[at_step(1, lambda lr_scheduler, **_: lr_scheduler.step())]
    )
    trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx([0.1, 0.05, 0.025, 0.0])


def test_weight_decay_of_a_group_changed_by_a_callback_acts(make_trainer):
    def decay(optimizer, **_):
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.5

    trainer, other = make_trainer(callbacks=[when(on_train_begin=decay)]), Net()
    trainer.train()

    def decayed(number):
        for parameter in other.parameters():
            parameter.grad += 0.5 * parameter.detach()

    by_hand(other, batches(rows()), before=decayed)
    assert_same(trainer.model, other)


# Gradients and weights


def test_gradients_changed_before_the_optimizer_are_those_applied(make_trainer):
    def scale(model, **_):
        for parameter in model.parameters():
            parameter.grad *= 0.5

    trainer, other = make_trainer(callbacks=[when(on_pre_optimizer_step=scale)]), Net()
    trainer.train()
    by_hand(other, batches(rows()), rate=RATE / 2)
    assert_same(trainer.model, other)


def test_gradients_clipped_by_a_callback_are_clipped(make_trainer):
    clip = when(on_pre_optimizer_step=lambda model, **_: nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    trainer, other = make_trainer(callbacks=[clip]), Net()
    trainer.train()
    by_hand(other, batches(rows()), max_norm=0.01)
    assert_same(trainer.model, other)


def test_gradients_cleared_between_micro_batches_leave_the_last_one(make_trainer):
    clear = when(on_substep_end=lambda optimizer, **_: optimizer.zero_grad())
    trainer, other = make_trainer(callbacks=[clear], gradient_accumulation_steps=2, max_steps=2), Net()
    trainer.train()
    _, second, _, fourth = batches(rows())
    by_hand(other, [second, fourth], rate=RATE / 2)
    assert_same(trainer.model, other)


def test_weights_clamped_after_every_step_stay_within(make_trainer):
    def clamp(model, **_):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    trainer, other = make_trainer(callbacks=[when(on_step_end=clamp)]), Net()
    trainer.train()
    by_hand(other, batches(rows()), after=lambda number: clamp(other))
    assert_same(trainer.model, other)


def test_weights_loaded_by_a_callback_are_trained_on(make_trainer):
    other = Net(seed=7)
    load = at_step(2, lambda model, **_: model.load_state_dict(Net(seed=7).state_dict()))
    trainer = make_trainer(callbacks=[load])
    trainer.train()
    by_hand(other, batches(rows())[2:])
    assert_same(trainer.model, other)


# Random numbers


def test_a_seed_set_by_a_callback_is_that_of_the_next_dropout(make_trainer):
    trainer, other = make_trainer(model=Net(dropout=0.5), callbacks=[
        when(on_step_begin=lambda state, **_: torch.manual_seed(state.global_step))
    ]), Net(dropout=0.5)  # fmt: skip
    trainer.train()

    steps = iter(range(4))

    def seeded(model, batch):
        torch.manual_seed(next(steps))
        return model(**batch)["loss"]

    assert logged(trainer) == pytest.approx(by_hand(other, batches(rows()), loss=seeded))


def test_random_numbers_drawn_by_a_callback_do_not_change_the_order_of_the_data(make_trainer):
    def order(*callbacks):
        seen = []
        note = when(on_micro_batch_end=lambda inputs, **_: seen.extend(inputs["labels"].tolist()))
        trainer = make_trainer(train_sampling_strategy="random", max_steps=8, callbacks=[*callbacks, note])
        trainer.train()
        return seen

    draw = when(on_step_end=lambda **_: (torch.rand(3), np.random.rand(3)))
    assert order(draw) == order()


# Arguments


def test_the_norm_for_clipping_changed_by_a_callback_acts_from_the_next_step(make_trainer):
    change = at_step(2, lambda args, **_: setattr(args, "max_grad_norm", 0.01))
    trainer, other = make_trainer(max_grad_norm=1e9, callbacks=[change]), Net()
    trainer.train()
    steps = batches(rows())
    by_hand(other, steps[:2])
    by_hand(other, steps[2:], max_norm=0.01)
    assert_same(trainer.model, other)


@pytest.mark.parametrize(("name", "event"), [("logging_steps", "loss"), ("eval_steps", "eval_loss")])
def test_intervals_of_the_arguments_changed_by_a_callback_act(make_trainer, name, event):
    change = when(on_step_end=lambda args, state, **_: state.global_step == 2 and setattr(args, name, 1))
    options = {"eval_dataset": rows(4), "eval_strategy": "steps", "logging_steps": 2, "eval_steps": 2}
    trainer = make_trainer(**options, callbacks=[change], max_steps=6)
    trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if event in entry]
    assert steps == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(("name", "event"), [("logging_steps", "loss"), ("eval_steps", "eval_loss")])
def test_intervals_of_the_state_changed_by_a_callback_act(make_trainer, name, event):
    change = when(on_step_end=lambda state, **_: state.global_step == 2 and setattr(state, name, 1))
    options = {"eval_dataset": rows(4), "eval_strategy": "steps", "logging_steps": 2, "eval_steps": 2}
    trainer = make_trainer(**options, callbacks=[change], max_steps=6)
    trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if event in entry]
    assert steps == [2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_steps", 6),
        ("num_train_epochs", 2),
        ("learning_rate", 0.01),
        ("gradient_accumulation_steps", 2),
        ("per_device_train_batch_size", 4),
    ],
)
def test_an_argument_that_a_run_takes_when_it_begins_changed_in_it_is_refused(make_trainer, name, value):
    trainer = make_trainer(callbacks=[at_step(2, lambda args, **_: setattr(args, name, value))])
    with pytest.raises(ValueError, match=rf"args\.{name} was changed from .* to {value}.* during training"):
        trainer.train()
    assert trainer.state.global_step == 2
