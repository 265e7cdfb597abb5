"""What callbacks of users change while a run goes on: modes, rates, gradients, weights, random numbers, arguments."""

import pytest
import torch
from habit_parts import RATE, Net, assert_same, at_step, batches, by_hand, rows, when

# The mode of the model


def test_gradients_switched_off_by_a_callback_are_not_a_run_that_learns_nothing(make_trainer):
    trainer = make_trainer(callbacks=[at_step(1, lambda **_: torch.set_grad_enabled(False))])
    try:
        with pytest.raises(RuntimeError, match="grad"):
            trainer.train()
    finally:
        torch.set_grad_enabled(True)


# Gradients and weights


def test_gradients_cleared_between_micro_batches_leave_the_last_one(make_trainer):
    clear = when(on_substep_end=lambda optimizer, **_: optimizer.zero_grad())
    trainer, other = make_trainer(callbacks=[clear], gradient_accumulation_steps=2, max_steps=2), Net()
    trainer.train()
    _, second, _, fourth = batches(rows())
    by_hand(other, [second, fourth], rate=RATE / 2)
    assert_same(trainer.model, other)


# Arguments


@pytest.mark.parametrize(("name", "event"), [("logging_steps", "loss"), ("eval_steps", "eval_loss")])
def test_intervals_of_the_state_changed_by_a_callback_act(make_trainer, name, event):
    change = when(on_step_end=lambda state, **_: state.global_step == 2 and setattr(state, name, 1))
    options = {"eval_dataset": rows(4), "eval_strategy": "steps", "logging_steps": 2, "eval_steps": 2}
    trainer = make_trainer(**options, callbacks=[change], max_steps=6)
    trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if event in entry]
    assert steps == [2, 3, 4, 5, 6]
