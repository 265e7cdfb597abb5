"""Flags, states, logs and other callbacks that users change from callbacks, in usual events and odd ones."""

from copy import deepcopy

import pytest
import torch
from habit_parts import (
    Net,
    answering,
    assert_same,
    at_step,
    batches,
    by_hand,
    logged,
    rows,
    when,
)
from safetensors.torch import load_file

from tr_core import TrainerControl


def set_flag(name):
    return lambda control, **_: setattr(control, name, True)


# Flags


@pytest.mark.parametrize("event", ["on_log", "on_evaluate", "on_step_begin", "on_optimizer_step", "on_micro_batch_end"])
def test_a_stop_asked_for_in_any_event_ends_the_run_after_that_step(make_trainer, event):
    stop = when(**{event: set_flag("should_training_stop")})
    trainer = make_trainer(eval_dataset=rows(4), eval_strategy="steps", eval_steps=1, callbacks=[stop])
    trainer.train()
    assert trainer.state.global_step == 1


ODD = [
    ("on_step_begin", "should_log"),
    ("on_log", "should_evaluate"),
    ("on_log", "should_save"),
    ("on_evaluate", "should_save"),
    ("on_evaluate", "should_log"),
    ("on_save", "should_log"),
    ("on_save", "should_evaluate"),
    ("on_epoch_begin", "should_training_stop"),
    ("on_epoch_end", "should_log"),
    ("on_epoch_end", "should_evaluate"),
    ("on_epoch_end", "should_save"),
]
OF_FLAG = {"should_log": "on_log", "should_evaluate": "on_evaluate", "should_save": "on_save"}


@pytest.mark.parametrize(("event", "flag"), ODD)
def test_a_flag_set_in_an_odd_event_is_heeded(make_trainer, event, flag):
    asked, done = [], []

    def begin(state, control, **_):
        if event in OF_FLAG.values() and state.global_step == 1:  # have the odd event happen once
            setattr(control, next(name for name, at in OF_FLAG.items() if at == event), True)

    def ask(control, state, **_):
        if not asked:
            asked.append(state.global_step)
            setattr(control, flag, True)

    def note(state, logs=None, **_):
        if asked and (logs is None or "loss" in logs):
            done.append(state.global_step)

    watch = {OF_FLAG[flag]: note} if flag in OF_FLAG else {"on_train_end": note}
    trainer = make_trainer(
        train_dataset=rows(6), eval_dataset=rows(2), max_steps=-1, num_train_epochs=2, logging_strategy="no",
        callbacks=[when(**watch), when(on_step_end=begin), when(**{event: ask})], save_steps=100,
    )  # fmt: skip
    trainer.train()
    assert len(asked) == 1
    assert done
    assert done[0] - asked[0] in {0, 1}


def test_a_save_asked_for_when_training_ends_is_refused_in_the_log(make_trainer, tmp_path, monkeypatch):
    trainer = make_trainer(callbacks=[when(on_train_end=set_flag("should_save"))])
    errors = []
    monkeypatch.setattr(trainer.logger, "error", errors.append)
    trainer.train()
    assert len(errors) == 1
    assert errors[0].startswith("should_save was set in on_train_end, when the run is over")


def test_a_control_object_that_is_returned_new_is_taken_in(make_trainer):
    trainer = make_trainer(callbacks=[answering(on_step_end=lambda **_: TrainerControl(should_training_stop=True))])
    trainer.train()
    assert trainer.state.global_step == 1


# The state


def test_a_run_made_shorter_by_its_state_ends_there(make_trainer):
    trainer = make_trainer(callbacks=[at_step(1, lambda state, **_: setattr(state, "max_steps", 2))])
    trainer.train()
    assert trainer.state.global_step == 2


def test_the_history_edited_by_a_callback_is_what_is_kept_and_saved(make_trainer, tmp_path):
    def edit(state, **_):
        state.log_history[-1]["note"] = "mine"

    trainer = make_trainer(callbacks=[when(on_log=edit)])
    trainer.train()
    trainer.save_state()
    assert all(entry["note"] == "mine" for entry in trainer.state.log_history)
    assert (tmp_path / "out" / "trainer_state.json").read_text("utf-8").count('"mine"') == len(
        trainer.state.log_history
    )


def test_the_best_metric_set_by_a_callback_is_compared_with(make_trainer):
    trainer = make_trainer(
        eval_dataset=rows(4), eval_strategy="steps", eval_steps=1, metric_for_best_model="eval_loss",
        callbacks=[when(on_train_begin=lambda state, **_: setattr(state, "best_metric", -1.0))],
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_metric == -1.0


# Logs and metrics


def test_entries_added_to_logs_reach_the_callbacks_that_follow(make_trainer):
    seen = []
    add = when(on_log=lambda logs, **_: logs.update(mine=1.0))
    note = when(on_log=lambda logs, **_: seen.append(logs["mine"]))
    make_trainer(callbacks=[add, note]).train()
    assert seen == [1.0] * 5


def test_metrics_added_in_on_evaluate_are_in_the_result_and_choose_the_best_model(make_trainer):
    scores = iter([1.0, 3.0, 2.0, 0.0])
    add = when(on_evaluate=lambda metrics, **_: metrics.update(eval_reward=next(scores)))
    trainer = make_trainer(
        eval_dataset=rows(4), eval_strategy="steps", eval_steps=1, metric_for_best_model="eval_reward",
        greater_is_better=True, callbacks=[add],
    )  # fmt: skip
    trainer.train()
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (3.0, 2)


# Callbacks and callbacks


def test_a_callback_added_by_a_callback_hears_the_events_that_follow(make_trainer):
    steps = []
    trainer = make_trainer()
    second = when(on_step_end=lambda state, **_: steps.append(state.global_step))
    trainer.add_callback(at_step(2, lambda **_: trainer.add_callback(second)))
    trainer.train()
    assert steps[-2:] == [3, 4]
    assert len(steps) <= 3


def test_a_callback_that_removes_itself_keeps_no_other_from_its_event(make_trainer):
    steps, trainer = [], make_trainer()

    def leave(state, **_):
        trainer.remove_callback(once)

    once = when(on_step_end=leave)
    trainer.add_callback(once)
    trainer.add_callback(when(on_step_end=lambda state, **_: steps.append(state.global_step)))
    trainer.train()
    assert steps == [1, 2, 3, 4]
    assert once not in trainer.callback_handler.callbacks


def test_a_callback_appended_to_the_list_itself_is_called(make_trainer):
    steps, trainer = [], make_trainer()
    trainer.callback_handler.callbacks.append(when(on_step_end=lambda state, **_: steps.append(state.global_step)))
    trainer.train()
    assert steps == [1, 2, 3, 4]


def test_an_event_set_on_a_callback_that_was_added_is_called(make_trainer):
    steps, watch = [], when(on_log=lambda **_: None)
    trainer = make_trainer(callbacks=[watch])
    watch.on_step_end = lambda args, state, control, **_: steps.append(state.global_step)
    trainer.train()
    assert steps == [1, 2, 3, 4]


def test_one_callback_of_two_trainers_hears_both(make_trainer):
    steps = []
    watch = when(on_step_end=lambda state, **_: steps.append(state.global_step))
    make_trainer(callbacks=[watch], max_steps=2).train()
    make_trainer(callbacks=[watch], max_steps=3).train()
    assert steps == [1, 2, 1, 2, 3]


# Work in a callback


def test_an_evaluation_of_the_training_data_beside_the_usual_one_is_logged(make_trainer):
    trainer = make_trainer(eval_dataset=rows(4), eval_strategy="epoch", max_steps=-1, num_train_epochs=2)

    def evaluate_both(control, **_):
        if control.should_evaluate:
            before = deepcopy(control)
            trainer.evaluate(trainer.train_dataset, metric_key_prefix="train")
            return before
        return None

    trainer.add_callback(answering(on_epoch_end=evaluate_both))
    trainer.train()
    assert len(logged(trainer, "train_loss")) == 3  # the last one is that of the run
    assert len(logged(trainer, "eval_loss")) == 2


def test_an_evaluation_in_every_step_changes_nothing_of_training(make_trainer):
    trainer, other = make_trainer(model=Net(dropout=0.5), eval_dataset=rows(4)), make_trainer(model=Net(dropout=0.5))
    trainer.add_callback(when(on_step_end=lambda **_: trainer.evaluate()))
    trainer.train()
    other.train()
    assert logged(trainer) == logged(other)
    assert len(logged(trainer, "eval_loss")) == 4
    assert_same(trainer.model, other.model)


def test_a_prediction_in_a_callback_is_that_of_the_weights_of_its_step(make_trainer):
    trainer, found, other = make_trainer(), [], Net()
    trainer.add_callback(at_step(2, lambda **_: found.append(trainer.predict(rows(4)).predictions)))
    trainer.train()
    by_hand(other, batches(rows())[:2])
    with torch.no_grad():
        assert found[0] == pytest.approx(other(batches(rows(4), 4)[0]["x"])["logits"].numpy(), rel=1e-5)


def test_a_model_saved_in_a_callback_has_the_weights_of_its_step(make_trainer, tmp_path):
    trainer, other = make_trainer(), Net()
    trainer.add_callback(at_step(2, lambda **_: trainer.save_model(tmp_path / "mine")))
    trainer.train()
    by_hand(other, batches(rows())[:2])
    saved = Net()
    saved.load_state_dict(load_file(tmp_path / "mine" / "model.safetensors"))
    assert_same(saved, other)
