"""Signals that come where Python cannot act on them: in a call that is deaf to them, and in a worker just started."""

import os
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest
from signal_at import saving_trainer

from tr_core.preemption import signals
from tr_core.preemption.signals import SIGNALS


@pytest.fixture
def saving(make_trainer, tmp_path):
    return partial(saving_trainer, make_trainer, tmp_path)


DEAF = """
import os, signal, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from tr_core.preemption.signals import StopSignals

def send():
    for name in sys.argv[2:]:
        time.sleep(1.2)
        os.kill(os.getpid(), getattr(signal, name))

with StopSignals(int, watches=True):
    threading.Thread(target=send, daemon=True).start()
    dist.FileStore(sys.argv[1], 2).wait(["never"], timedelta(hours=1))
"""


@pytest.mark.parametrize("names", [["SIGINT", "SIGINT"], ["SIGUSR1", "SIGTERM"], ["SIGTERM", "SIGTERM"]], ids="-".join)
def test_a_second_signal_ends_a_process_at_once_that_is_in_a_call_which_python_cannot_interrupt(tmp_path, names):
    command = [sys.executable, "-c", DEAF, str(tmp_path / "store"), *names]
    end = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert end.returncode == 128 + getattr(signal, names[-1]), end.stderr
    assert f"{names[-1]}, the second signal: stopping at once" in end.stderr


def test_what_watches_for_a_second_signal_leaves_nothing_behind():
    for _ in range(3):
        with signals.StopSignals(int, watches=True) as block:
            signal.raise_signal(signal.SIGTERM)
        assert block.number == signal.SIGTERM
        assert signal.set_wakeup_fd(-1) == -1
    assert all(thread.name != "second signals" or not thread.join(30) for thread in threading.enumerate())


def test_an_event_loop_that_is_given_the_signals_keeps_them():
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    try:
        with signals.StopSignals(int, watches=True):
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
