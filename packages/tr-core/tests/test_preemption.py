"""Tell a run to stop at every kind of moment: it saves once, says how it ended, and puts everything back."""

import pickle
import signal
from pathlib import Path

import pytest
from support.callbacks import SignalAt
from support.checkpointer import MemoryCheckpointer
from support.runs import assert_ends_alike, handlers, interrupt

from tr_core import TrainerCallback
from tr_core.preemption.signals import Interrupted, KeyboardInterrupted


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGINT, 130)])
def test_a_signal_saves_the_step_under_way_and_ends_the_run_with_its_exit_code(saving, tmp_path, number, code):
    before, watch = handlers(), SignalAt("on_step_begin", 4, number)
    trainer = saving(watch)
    error = interrupt(trainer)
    assert (error.code, error.signal, error.step) == (code, number, 5)
    assert error.checkpoint == tmp_path / "checkpoint-5"
    assert trainer.checkpointer().saves == [5]
    assert watch.noted == [("log", 3), ("save", 5), ("train_end", 5)]
    assert watch.error is error
    assert handlers() == before
    assert isinstance(error, KeyboardInterrupt) == (number == signal.SIGINT)


def test_the_exceptions_come_through_a_pickle_whole():
    for kind in (Interrupted, KeyboardInterrupted):
        error = pickle.loads(pickle.dumps(kind(15, 7, Path("there"))))
        assert (type(error), error.code, error.step, error.checkpoint) == (kind, 143, 7, Path("there"))
        assert str(error) == "SIGTERM at step 7, saved as there"


@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_step_end", "on_log"])
def test_whenever_in_a_step_it_comes_the_checkpoint_is_of_a_whole_step_and_the_run_continues_as_if_uncut(saving, event):
    alone = saving()
    alone.train()
    cut = saving(SignalAt(event, 6 if event == "on_log" else 5))
    error = interrupt(cut)
    resumed = saving(checkpointer=cut.checkpointer())
    resumed.train(resume_from_checkpoint=True)
    assert error.step in (5, 6, 7)
    assert_ends_alike(alone, resumed)


@pytest.mark.parametrize(("event", "stops_at"), [("on_train_begin", 1), ("on_step_end", 5), ("on_save", 5)])
def test_a_step_that_is_saved_anyway_is_saved_once(saving, event, stops_at):
    cut = saving(SignalAt(event, 0 if event == "on_train_begin" else 5), save_steps=stops_at)
    assert interrupt(cut).step == stops_at
    assert cut.checkpointer().saves == [stops_at]


def test_a_signal_during_a_save_ends_the_run_with_that_checkpoint(saving, tmp_path):
    class Signalled(MemoryCheckpointer):
        def save(self, step, parts, **more):
            signal.raise_signal(signal.SIGTERM)
            return super().save(step, parts, **more)

    cut = saving(checkpointer=Signalled(tmp_path), save_steps=4)
    assert interrupt(cut).step == 4
    assert cut.checkpointer().saves == [4]


@pytest.mark.parametrize("event", ["on_step_begin", "on_step_end", "on_save", "on_train_end"])
def test_a_signal_in_the_last_step_of_a_run_changes_nothing(saving, event):
    watch = SignalAt(event, 9 if event == "on_step_begin" else 10)
    trainer = saving(watch)
    output = trainer.train()
    assert output.global_step == 10
    assert watch.error is None
    assert trainer.checkpointer().saves == [10]
    assert watch.noted[-2:] == [("log", 10), ("train_end", 10)]
    assert handlers() == [signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL]


def test_that_the_last_step_made_a_signal_needless_is_said(saving, heard):
    lines = heard()
    saving(SignalAt("on_step_begin", 9)).train()
    assert "SIGTERM came with the run's last step: it is complete, and ends as if there had been none" in lines


def test_the_log_says_which_signal_came_where_the_run_is_saved_and_how_to_continue(saving, heard, tmp_path):
    lines = heard()
    interrupt(saving(SignalAt("on_step_begin", 4)))
    expected = (
        f"SIGTERM: stopping with exit code 143 at step 5 of 10, saved as {tmp_path / 'checkpoint-5'}; "
        "train(resume_from_checkpoint=True) with the same arguments goes on from there"
    )
    assert any(expected in line for line in lines)


def test_with_save_only_model_the_log_says_that_no_run_can_continue(saving, heard):
    lines = heard()
    interrupt(saving(SignalAt("on_step_begin", 4), save_only_model=True))
    assert any("the checkpoint holds the weights, but no run can go on from it" in line for line in lines)


# Saves in the background


class FailsInBackground(MemoryCheckpointer):
    """Finds out at the check after `step` that a write has failed."""

    def __init__(self, folder, checks):
        super().__init__(folder)
        self.checks, self.waits = checks, 0

    def check(self):
        self.checks -= 1
        if self.checks == 0:
            raise OSError("no space is left")

    def wait(self):
        self.waits += 1


def test_a_background_save_that_failed_ends_the_run_at_the_next_step(saving, tmp_path):
    watch = SignalAt("", 0)
    trainer = saving(watch, checkpointer=FailsInBackground(tmp_path, 5), save_async=True)
    with pytest.raises(OSError, match="no space is left") as caught:
        trainer.train()
    assert trainer.state.global_step == 5
    assert watch.error is caught.value


def test_a_failed_save_goes_before_a_signal(saving, tmp_path):
    trainer = saving(SignalAt("on_step_begin", 4), checkpointer=FailsInBackground(tmp_path, 5), save_async=True)
    with pytest.raises(OSError, match="no space is left"):
        trainer.train()
    assert trainer.checkpointer().saves == []


def test_without_handlers_a_failed_save_ends_the_run_too(saving, tmp_path):
    before, seen = handlers(), []

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(handlers())

    options = {"save_async": True, "enable_jit_checkpoint": False}
    with pytest.raises(OSError, match="no space is left"):
        saving(Look(), checkpointer=FailsInBackground(tmp_path, 5), **options).train()
    assert seen == [before] * 5


def test_the_end_of_a_run_and_an_interruption_wait_for_the_save_in_flight(saving, tmp_path):
    whole = FailsInBackground(tmp_path, 1000)
    saving(checkpointer=whole, save_async=True).train()
    assert whole.waits >= 1
    cut = FailsInBackground(tmp_path, 1000)
    interrupt(saving(SignalAt("on_step_begin", 4), checkpointer=cut, save_async=True))
    assert cut.waits >= 1


def test_a_save_that_fails_after_the_last_step_is_raised(saving, tmp_path):
    class FailsLast(MemoryCheckpointer):
        def wait(self):
            raise OSError("no space is left")

    with pytest.raises(OSError, match="no space is left"):
        saving(checkpointer=FailsLast(tmp_path), save_async=True).train()


class SavesInBackground(MemoryCheckpointer):
    """Has a write under way after each save, which fails; `path` waits for it, as the protocol says."""

    def __init__(self, folder):
        super().__init__(folder)
        self.is_writing, self.failure = False, None

    def save(self, *args, **kwargs):
        self.is_writing = True
        return super().save(*args, **kwargs)

    def path(self, step):
        if self.is_writing:
            self.is_writing, self.failure = False, OSError("no space is left")
        return super().path(step)

    def check(self):
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def wait(self):
        self.path(0)
        self.check()


class RaisesOnce(TrainerCallback):
    def __init__(self):
        self.is_told, self.error = True, None

    def on_save(self, args, state, control, **kwargs):
        if self.is_told:
            self.is_told = False
            raise KeyError("on purpose")

    def on_train_end(self, args, state, control, **kwargs):
        self.error = kwargs["error"]


def test_a_save_that_fails_while_an_exception_ends_the_run_is_noted_in_it_and_ends_no_other_run(saving, tmp_path):
    checkpointer = SavesInBackground(tmp_path)
    trainer = saving(RaisesOnce(), checkpointer=checkpointer, save_async=True)
    with pytest.raises(KeyError, match="on purpose") as caught:
        trainer.train()
    assert caught.value.__notes__ == ["besides, in the background: OSError: no space is left"]
    assert not checkpointer.is_writing  # before the end of training was announced: what follows it may need the files
    trainer.args.save_strategy = "no"
    trainer.train()


def test_a_save_that_a_callback_asks_for_without_save_strategy_is_waited_for(saving, tmp_path):
    class Asks(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_save = state.global_step == 2

    checkpointer = SavesInBackground(tmp_path)
    options = {"checkpointer": checkpointer, "save_async": True, "save_strategy": "no"}
    with pytest.raises(OSError, match="no space is left"):
        saving(Asks(), **options).train()


def test_without_checkpoints_none_are_asked_about(saving, tmp_path):
    checkpointer = FailsInBackground(tmp_path, 1)
    saving(checkpointer=checkpointer, save_async=True, save_strategy="no").train()
    assert (checkpointer.checks, checkpointer.waits) == (1, 0)
