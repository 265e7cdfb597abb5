"""Whose signals a run takes, what it costs before one comes, and signals that come where Python cannot act on them."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.callbacks import SignalAt
from support.runs import assert_ends_alike, handlers, interrupt

from tr_core import TrainerCallback
from tr_core.preemption import preemption as interruption_module
from tr_core.preemption import signals
from tr_core.preemption.signals import SIGNALS, Interrupted


class Heard:
    """Stands for a logger: keeps what it is given, whatever the level."""

    def __init__(self):
        self.lines = []

    def info(self, text, *args):
        self.lines.append(text % args if args else text)

    debug = warning = error = info

    def isEnabledFor(self, level):  # noqa: N802  the name of logging.Logger
        return True

    def log(self, level, text, *args, stacklevel=1):
        self.info(text, *args)

    def said(self, text):
        return any(text in line for line in self.lines)


def test_without_checkpoints_signals_act_as_usual(saving):
    with pytest.raises(KeyboardInterrupt) as caught:
        saving(SignalAt("on_step_begin", 4, signal.SIGINT), save_strategy="no").train()
    assert not isinstance(caught.value, Interrupted)


def test_switched_off_it_leaves_signals_alone(saving):
    trainer = saving(SignalAt("on_step_begin", 4, signal.SIGINT), enable_jit_checkpoint=False)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.train()
    assert not isinstance(caught.value, Interrupted)
    assert trainer.checkpointer().saves == []


def test_before_training_begins_a_signal_acts_as_usual(saving, monkeypatch):
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
        assert "callbacks.py" in (tmp_path / "stacks").read_text()


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
    monkeypatch.setattr(signals._Watch, "start", lambda *_: None)  # as beside an event loop: the handler counts alone
    codes, clock = [], iter([100.0, 100.0 + after_s])
    monkeypatch.setattr(signals.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(signals.os, "_exit", codes.append)
    monkeypatch.setattr(signals.multiprocessing, "active_children", list)  # those of other tests live on
    with signals.StopSignals(lambda: None) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(second)
    assert codes == [128 + second]
    assert stop.number == signal.SIGTERM


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_forked_process_ends_by_a_signal_as_usual_and_its_parent_hears_nothing(number):
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


def test_a_run_can_be_interrupted_and_resumed_in_one_process(saving):
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
    assert error.step == 6  # the epoch that the callback ended has its own end, and the next step is the one
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


def test_the_first_signal_is_answered_at_once(saving, capfd):
    error = interrupt(saving(SignalAt("on_step_begin", 4, signal.SIGINT)))
    assert error.step == 5
    shown = capfd.readouterr().err
    assert shown.count("SIGINT: saving and stopping when this step is done; a second one stops at once\n") == 1


# Where Python cannot act on a signal


DEAF = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from tr_core.preemption.signals import StopSignals

def send():
    time.sleep(0.2)  # until the main thread waits
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    time.sleep(1.2 if sys.argv[2] == sys.argv[3] else 0.2)  # one that comes sooner is the first one, passed on again
    os.kill(os.getpid(), getattr(signal, sys.argv[3]))

with StopSignals(int):
    threading.Thread(target=send, daemon=True).start()
    dist.FileStore(sys.argv[1], 2).wait(["never"], timedelta(hours=1))
"""


@pytest.mark.parametrize(
    "names",
    [
        ["SIGINT", "SIGINT"],
        *(pytest.param([name, "SIGTERM"], marks=pytest.mark.slow) for name in ("SIGUSR1", "SIGTERM")),
    ],
    ids="-".join,
)
def test_a_second_signal_ends_a_process_at_once_that_is_in_a_call_which_python_cannot_interrupt(tmp_path, names):
    command = [sys.executable, "-c", DEAF, str(tmp_path / "store"), *names]
    end = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert end.returncode == 128 + getattr(signal, names[-1]), end.stderr
    assert f"{names[-1]}, the second signal: stopping at once" in end.stderr


def test_what_watches_for_a_second_signal_leaves_nothing_behind():
    for _ in range(3):
        with signals.StopSignals(int) as block:
            signal.raise_signal(signal.SIGTERM)
        assert block.number == signal.SIGTERM
        assert signal.set_wakeup_fd(-1) == -1
    assert all(thread.name != "second signals" or not thread.join(30) for thread in threading.enumerate())


def test_an_event_loop_that_is_given_the_signals_keeps_them():
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    try:
        with signals.StopSignals(int):
            signal.raise_signal(signal.SIGTERM)
        assert os.read(read, 1) == bytes([signal.SIGTERM])
    finally:
        assert signal.set_wakeup_fd(-1) == write
        os.close(read)
        os.close(write)


WHEN_FORKED = []
if hasattr(os, "register_at_fork"):  # what is registered stays, so it is empty but in one test
    os.register_at_fork(after_in_child=lambda: [act() for act in WHEN_FORKED])


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="nothing is forked")
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_to_a_worker_that_has_just_been_started_does_not_end_it(saving, monkeypatch, number):
    monkeypatch.setattr(f"{__name__}.WHEN_FORKED", [lambda: os.kill(os.getpid(), number)])
    trainer = saving(dataloader_num_workers=2, dataloader_multiprocessing_context="fork")
    assert trainer.train().global_step == 10


KILLED_WITH_WORKERS = """
import multiprocessing, os, signal, sys
import torch
from tr_core import Trainer, TrainerCallback, TrainingArguments

class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

class Model(torch.nn.Linear):
    def forward(self, x):
        return {"loss": super().forward(x).sum()}

if __name__ == "__main__":
    args = TrainingArguments(
        sys.argv[1], max_steps=5, use_cpu=True, report_to="none", disable_tqdm=True, dataloader_num_workers=2,
        dataloader_multiprocessing_context="forkserver", save_strategy=sys.argv[2],
    )
    Trainer(Model(2, 1), args, train_dataset=[{"x": torch.ones(2)}] * 99, callbacks=[Killed()]).train()
"""


@pytest.mark.parametrize("save_strategy", ["no", pytest.param("steps", marks=pytest.mark.slow)])
def test_workers_of_a_fork_server_end_with_a_process_that_was_killed(tmp_path, save_strategy):
    script = tmp_path / "train.py"
    script.write_text(KILLED_WITH_WORKERS)
    command = [sys.executable, str(script), str(tmp_path / "out"), save_strategy]
    ended = subprocess.run(command, timeout=120, stdout=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL
    workers = [int(number) for number in ended.stdout.split()]
    assert len(workers) == 2
    until_s = time.monotonic() + 60
    while alive := [number for number in workers if os.path.exists(f"/proc/{number}")]:
        assert time.monotonic() < until_s, alive
        time.sleep(0.1)
