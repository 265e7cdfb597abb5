"""Whose signals a run takes, what it costs before one comes, and how failed saves in the background end it."""

import faulthandler
import os
import signal
import sys
import threading
import time
from functools import partial

import pytest
from memory_checkpointer import MemoryCheckpointer
from signal_at import Heard, SignalAt, assert_ends_alike, handlers, interrupt, saving_trainer

from tr_core import TrainerCallback
from tr_core.preemption import preemption as interruption_module
from tr_core.preemption import signals
from tr_core.preemption.signals import SIGNALS, Interrupted


@pytest.fixture
def saving(make_trainer, tmp_path):
    return partial(saving_trainer, make_trainer, tmp_path)


def test_without_checkpoints_signals_act_as_ever(saving):
    with pytest.raises(KeyboardInterrupt) as caught:
        saving(SignalAt("on_step_begin", 4, signal.SIGINT), save_strategy="no").train()
    assert not isinstance(caught.value, Interrupted)


def test_switched_off_it_leaves_signals_alone(saving):
    trainer = saving(SignalAt("on_step_begin", 4, signal.SIGINT), enable_jit_checkpoint=False)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train()
    assert not isinstance(caught.value, Interrupted)
    assert trainer.checkpointer().saves == []


def test_before_training_begins_a_signal_acts_as_ever(saving, monkeypatch):
    trainer = saving()
    monkeypatch.setattr(trainer, "prepare", lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train()
    assert not isinstance(caught.value, Interrupted)


def test_a_handler_of_the_users_stays_and_is_called_at_once(saving, monkeypatch):
    heard, came = Heard(), []
    monkeypatch.setattr(signals, "logger", heard)
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        trainer = saving(SignalAt("on_step_begin", 4, signal.SIGUSR1))
        assert trainer.train().global_step == 10
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert came == [signal.SIGUSR1]
    assert heard.said("SIGUSR1 has a handler already, which stays: no checkpoint is written for it")
    assert heard.said("signal.signal(signal.SIGUSR1, signal.SIG_DFL) before train() takes it away")


def test_an_ignored_signal_stays_ignored(saving):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert saving(SignalAt("on_step_begin", 4, signal.SIGINT)).train().global_step == 10
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there it is known")
def test_a_handler_that_dumps_stacks_stays(saving, tmp_path):
    with open(tmp_path / "stacks", "w+") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks)
        try:
            assert saving(SignalAt("on_step_begin", 4, signal.SIGUSR1)).train().global_step == 10
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        assert "signal_at.py" in (tmp_path / "stacks").read_text()


def test_outside_of_the_main_thread_no_handler_is_set_and_that_is_said(saving, monkeypatch):
    heard, seen = Heard(), []
    monkeypatch.setattr(signals, "logger", heard)

    class Look(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            seen.append(handlers())

    before, trainer = handlers(), saving(Look())
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert seen == [before] * 10
    assert heard.lines == [
        "train() is not called in the main thread, so signals act as without it: they save no checkpoint"
    ]


def test_a_signal_that_a_launcher_passes_on_once_more_is_the_same_one(saving):
    class SignalsTwice(SignalAt):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)

    assert interrupt(saving(SignalsTwice("", 0))).step == 5


@pytest.mark.parametrize(("second", "after_s"), [(signal.SIGTERM, 1.0), (signal.SIGINT, 0.0), (signal.SIGUSR1, 0.0)])
def test_one_that_comes_later_or_another_one_is_the_second(saving, monkeypatch, second, after_s):
    """A process that ends so runs no further line, which `os._exit` stands for here."""
    codes, clock = [], iter([100.0, 100.0 + after_s])
    monkeypatch.setattr(signals.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    with signals.StopSignals(lambda: None) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(second)
    assert codes == [128 + second]
    assert stop.number == signal.SIGTERM


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_forked_process_ends_by_a_signal_as_ever_and_its_parent_hears_nothing(number):
    with signals.StopSignals(lambda: None) as stop:
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(number)
                time.sleep(30)
            except KeyboardInterrupt:
                os._exit(7)
            os._exit(9)
        _, status = os.waitpid(child, 0)
    assert stop.number == 0
    if number == signal.SIGINT:
        assert os.waitstatus_to_exitcode(status) == 7
    else:
        assert os.waitstatus_to_exitcode(status) == -number


def test_handlers_are_put_back_after_an_exception(saving):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise ArithmeticError

    before = handlers()
    with pytest.raises(ArithmeticError):
        saving(Fails()).train()
    assert handlers() == before


def test_a_run_can_be_told_to_stop_and_be_resumed_in_one_process(saving):
    alone = saving()
    alone.train()
    trainer = saving(SignalAt("on_step_begin", 2))
    interrupt(trainer)
    trainer.remove_callback(SignalAt)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 10
    assert_ends_alike(alone, trainer)


def test_before_a_signal_comes_a_step_calls_nothing_of_it(saving):
    files = {interruption_module.__file__, signals.__file__}
    called = []

    class Count(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            sys.setprofile(self.see if state.global_step == 2 else None)

        def see(self, frame, event, arg):
            if event == "call" and frame.f_code.co_filename in files:
                called.append(frame.f_code.co_qualname)

    trainer = saving(Count(), SignalAt("on_step_begin", 2))
    try:
        interrupt(trainer)
    finally:
        sys.setprofile(None)
    assert "Preemption._after_step" in called  # the signal of step 2 is seen, so calls are counted
    called.clear()
    saving(Count()).train()
    assert called == []


def test_a_callback_that_is_added_later_still_has_its_say_first(saving):
    class StopsEpoch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 5

    class Adds(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                signal.raise_signal(signal.SIGTERM)
                trainer.add_callback(StopsEpoch())

    trainer = saving(Adds(), num_train_epochs=2)
    error = interrupt(trainer)
    assert error.step == 6  # the pass that the callback ended has its own end, and the next step is the one
    assert trainer.state.epoch == pytest.approx(1.1)


def test_a_signal_while_callbacks_are_put_in_order_is_not_lost(saving):
    """It comes in the middle of `add`, which looks at every event of every callback."""

    class Sly:
        armed = False

        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 4:
                self.armed = True
                trainer.add_callback(TrainerCallback())

        @property
        def on_push_begin(self):  # the last event: that of steps has been looked at by then
            if self.armed:
                signal.raise_signal(signal.SIGTERM)
                self.armed = False

    trainer = saving(Sly())
    assert interrupt(trainer).step == 5


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


def test_a_save_that_fails_while_an_exception_ends_the_run_is_told_with_it_and_ends_no_other_run(saving, tmp_path):
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


def test_the_first_signal_is_answered_at_once(saving, capfd):
    error = interrupt(saving(SignalAt("on_step_begin", 4, signal.SIGINT)))
    assert error.step == 5
    told = capfd.readouterr().err
    assert told.count("SIGINT: saving and stopping when this step is done; a second one stops at once\n") == 1
