"""The state of a run as a file, and the states of callbacks in it."""

import json
import logging

import pytest
from support.checkpointer import MemoryCheckpointer

from tr_args import TrainingArguments
from tr_core import TrainerCallback, TrainerState


def test_the_state_is_written_as_strict_json_and_read_back(tmp_path):
    state = TrainerState(global_step=3, epoch=0.5, log_history=[{"loss": float("nan"), "step": 1}], best_metric=0.25)
    state.save_to_json(tmp_path / "state.json")
    text = (tmp_path / "state.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = TrainerState.load_from_json(tmp_path / "state.json")
    assert (again.global_step, again.epoch, again.best_metric) == (3, 0.5, 0.25)


def test_shares_of_a_run_become_steps():
    state = TrainerState()
    state.compute_steps(TrainingArguments(logging_steps=0.05, eval_steps=0.5, save_steps=7), 30)
    assert (state.logging_steps, state.eval_steps, state.save_steps) == (2, 15, 7)


def test_unknown_keys_of_a_state_are_skipped_with_a_warning(heard):
    warnings = heard("warning", name="tr_core.state")
    state = TrainerState()
    state.load_state_dict({"global_step": 5, "of_the_future": 1})
    assert state.global_step == 5
    assert warnings == ["trainer state: skipped unknown keys ['of_the_future'], written by another version"]


def test_who_a_process_is_does_not_come_from_a_checkpoint():
    state = TrainerState(is_world_process_zero=False)
    state.load_state_dict(TrainerState(is_world_process_zero=True).state_dict())
    assert state.is_world_process_zero is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 5_000, "levels deep"),
        ('{"global_step": ' + "9" * 5_000 + "}", "5,000 characters"),
        ('{"global_step": 1, "global_step": 2}', "the key global_step twice"),
        ("[1]", "holds a list"),
        ("{", "not valid JSON"),
        ("\0", "not valid JSON"),
    ],
)
def test_a_state_that_is_none_is_refused(tmp_path, text, expected):
    (tmp_path / "trainer_state.json").write_text(text)
    with pytest.raises(ValueError, match=f"the trainer state .*{expected}"):
        TrainerState.load_from_json(tmp_path / "trainer_state.json")


# States of callbacks


class ExportableState:
    """The class of that name in transformers: what a user's callback inherits."""

    def state(self):
        raise NotImplementedError

    @classmethod
    def from_state(cls, state):
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


class Patience(TrainerCallback, ExportableState):
    def __init__(self, patience=3):
        self.patience, self.half, self.count = patience, patience / 2, 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

    def state(self):
        return {"args": {"patience": self.patience}, "attributes": {"count": self.count}}


class Reached(TrainerCallback, ExportableState):
    """Keeps in its arguments what it has reached."""

    def __init__(self, count=0):
        self.count = count

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

    def state(self):
        return {"args": {"count": self.count}, "attributes": {}}


class StopAtThree(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        return {"should_training_stop": state.global_step == 3}


@pytest.fixture
def resumed(make_trainer):
    """Train with some callbacks to step 3 of 5, and continue with others."""

    def run(first, second, **changes):
        keeper = MemoryCheckpointer()
        options = {"save_strategy": "steps", "save_steps": 3, "checkpointer": keeper}
        make_trainer(20, callbacks=[*first, StopAtThree()], **options).train()
        assert keeper.saves == [3]
        make_trainer(20, callbacks=second, **options, **changes).train(resume_from_checkpoint=True)
        return keeper

    return run


def test_a_restored_callback_continues_from_what_it_had_reached_and_is_the_same_object(resumed):
    later = Patience()
    keeper = resumed([Patience()], [later])
    assert later.count == 5
    assert keeper.saved[3]["callbacks"]["Patience"]["attributes"] == {"count": 3}


def test_what_is_kept_in_arguments_is_restored_too(resumed):
    later = Reached()
    resumed([Reached()], [later])
    assert later.count == 5


def test_each_of_two_callbacks_of_one_class_is_restored(resumed):
    one, other = Patience(1), Patience(2)
    resumed([Patience(1), Patience(2)], [one, other])
    assert (one.count, other.count, one.patience, other.patience) == (5, 5, 1, 2)


def test_an_argument_that_the_resumed_run_was_given_otherwise_is_its_own_and_is_said(resumed, caplog):
    caplog.set_level(logging.INFO)
    later = Patience(8)
    resumed([Patience(3)], [later], log_level="info")
    assert (later.patience, later.half, later.count) == (8, 4.0, 5)
    assert "callback Patience: patience: 3 -> 8" in caplog.text


def test_restored_callbacks_start_over_where_that_is_asked_for(resumed, caplog):
    later = Patience()
    resumed([Patience()], [later], restore_callback_states_from_checkpoint=False)
    assert later.count == 2


def test_a_checkpoint_of_another_program_has_the_attributes_alone(make_trainer):
    callback = Patience()
    trainer = make_trainer(callbacks=[callback])
    trainer.callback_handler.load_state_dict({"Patience": {"count": 4}})
    assert (callback.count, callback.patience) == (4, 3)


def test_a_callback_that_is_taken_away_is_not_saved(make_trainer):
    trainer = make_trainer(callbacks=[Patience])
    assert "Patience" in trainer.callback_handler.state_dict()
    trainer.remove_callback(Patience)
    assert "Patience" not in trainer.callback_handler.state_dict()


def test_a_state_of_another_form_is_refused_in_words(make_trainer):
    class Wrong(Patience):
        def state(self):
            return self.count

    with pytest.raises(TypeError, match=r"Wrong\.state\(\) returned 0; it must return a dict of two dicts"):
        make_trainer(callbacks=[Wrong()])


def test_state_dict_goes_before_state(make_trainer):
    class Both(Patience):
        def state_dict(self):
            return {"own": 1}

        def load_state_dict(self, state_dict):
            pass

    assert make_trainer(callbacks=[Both()]).callback_handler.state_dict()["Both"] == {"own": 1}
