"""Callbacks: the order of events, and what the flags of the control do."""

import parity_data as data
import parity_models as models
import pytest
from parity_callbacks import At

EVALUATION = data.classes(9, seed=8)


def test_the_events_of_an_accumulated_epoch_are_in_the_documented_order(parity):
    _, ours = parity(
        models.Mlp,
        data.classes(),
        EVALUATION,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=9,
    )
    begin, step = "step_begin substep_end", "pre_optimizer_step optimizer_step step_end log"
    evaluation = "prediction_step log evaluate"
    assert " ".join(ours.recorder.names()) == (
        f"train_begin epoch_begin {begin} {step} {begin} {step} {evaluation} step_begin {step} {evaluation} "
        "epoch_end log train_end"
    )


@pytest.mark.parametrize("event", ["on_step_end", "on_log", "on_step_begin"])
@pytest.mark.parametrize("flag", ["should_training_stop", "should_epoch_stop"])
def test_stopping_at_a_step_is_the_same(parity, event, flag):
    _, ours = parity(models.Mlp, data.classes(), callbacks=lambda: [At(event, 2, **{flag: True})])
    assert ours.trainer.state.global_step == {"should_training_stop": 2, "should_epoch_stop": 7}[flag] + (
        event == "on_step_begin"
    )


def test_stopping_at_an_accumulated_step_is_the_same(parity):
    parity(
        models.Mlp,
        data.classes(),
        callbacks=lambda: [At("on_step_end", 2, should_epoch_stop=True)],
        gradient_accumulation_steps=2,
    )


@pytest.mark.parametrize("event", ["on_epoch_end", "on_epoch_begin"])
def test_stopping_between_epochs_is_the_same(parity, event):
    parity(models.Mlp, data.classes(), callbacks=lambda: [At(event, 5, should_training_stop=True)])


def test_stopping_at_an_evaluation_is_the_same(parity):
    parity(
        models.Mlp,
        data.classes(),
        EVALUATION,
        callbacks=lambda: [At("on_evaluate", 4, should_training_stop=True)],
        eval_strategy="steps",
        eval_steps=2,
    )


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_optimizer_step"])
@pytest.mark.parametrize("flag", ["should_log", "should_evaluate"])
def test_asking_for_a_log_or_an_evaluation_is_the_same(parity, event, flag):
    step = 5 if event == "on_epoch_end" else 3
    parity(
        models.Mlp,
        data.classes(),
        EVALUATION,
        callbacks=lambda: [At(event, step, **{flag: True})],
        logging_strategy="no",
    )


@pytest.mark.parametrize("flag", ["should_log", "should_evaluate", "should_training_stop"])
def test_taking_back_a_flag_is_the_same(parity, flag):
    parity(
        models.Mlp,
        data.classes(),
        EVALUATION,
        callbacks=lambda: [At("on_step_end", 10, **{flag: False}), At("on_step_end", 4, **{flag: False})],
        eval_strategy="steps",
        eval_steps=2,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"logging_strategy": "no"},
        {"logging_strategy": "epoch"},
        {"logging_steps": 3},
        {"logging_steps": 0.3},
        {"logging_steps": 4, "logging_first_step": True},
        {"logging_steps": 1, "logging_first_step": True},
        {"logging_strategy": "epoch", "logging_first_step": True},
        {"logging_steps": 3, "gradient_accumulation_steps": 2},
        {"logging_steps": 100},
    ],
)
def test_each_way_of_logging_is_the_same(parity, arguments):
    parity(models.Mlp, data.classes(), **arguments)
