"""The end of a run, and of its process, while pushes are under way."""

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from ckpt_hub import Run, environment
from minihub import wait_until

from tr_ckpt import PushError
from tr_ckpt.hub import push_queue

# The client's own way of sending a file.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=.*:DeprecationWarning")


def test_the_wait_is_for_ten_minutes_and_the_bytes_at_two_megabytes_a_second():
    assert push_queue.limit_s(0) == 600
    assert push_queue.limit_s(7_200_000_000) == 600 + 3600


def test_sizes_are_given_in_millions_of_bytes():
    assert push_queue._size_text(0) == "0.0 MB"
    assert push_queue._size_text(51_000) == "0.1 MB"
    assert push_queue._size_text(1_234_567_890) == "1,234.6 MB"


def test_a_hub_that_never_answers_does_not_keep_a_run_for_ever(hub, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = Run(tmp_path / "out", hub, strategy="checkpoint", wait_limit_s=0.3)
    run.settle()
    gate = hub.hold("POST", "/commit/")
    run.save(1)
    wait_until(lambda: any("/commit/" in path for _, path in hub.log))
    run.finish()
    size = sum(file.stat().st_size for file in (run.output_dir / "checkpoint-1").iterdir())
    [begin] = [record.message for record in caplog.records if record.message.startswith("waiting for 1 push to")]
    assert f"waiting for 1 push to {hub.endpoint}/ci/run, " in begin
    assert begin.endswith(": 'Training in progress, step 1'; for 0 s at most, or until Ctrl-C")
    # What is left to send: the checkpoint, and what the end of the run adds is not pushed yet.
    assert f", {push_queue._size_text(size)}: " in begin
    [summary] = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert "not pushed: 'Training in progress, step 1', 'End of training'; last: " in summary
    assert f"hf upload ci/run {run.output_dir}/checkpoint-1 last-checkpoint" in summary
    assert not list(run.output_dir.glob(".tmp-*"))  # nothing holds the checkpoint's space any longer
    assert not run.callback._queue.is_busy()
    gate.set()


def test_a_trainer_may_show_that_the_run_waits(hub, tmp_path):
    run, seen = Run(tmp_path / "out", hub), []

    @contextmanager
    def shown():
        seen.append("waits")
        yield
        seen.append("waits no longer")

    run.callback.waiting = shown
    run.save(1)
    run.finish()
    assert seen == ["waits", "waits no longer"] * 2  # for what is under way, and for what the end adds


def test_a_long_wait_says_what_it_waits_for(hub, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(push_queue, "TELL_EVERY_S", 0.0)
    run = Run(tmp_path / "out", hub, wait_limit_s=0.5)
    run.settle()
    gate = hub.hold("POST", "/commit/")
    run.save(1)
    run.finish()
    gate.set()
    assert "still waiting for 1 push to" in caplog.text


def test_a_push_on_demand_does_not_wait_for_ever_either(hub, tmp_path):
    run = Run(tmp_path / "out", hub, wait_limit_s=0.3)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").touch()
    gate = hub.hold("POST", "/commit/")
    with pytest.raises(PushError, match="'My message' was not pushed: it was not done after 0 s"):
        run.callback.push_to_hub(tmp_path / "out", "My message")
    gate.set()


SCRIPT = """
import logging, os, signal, sys, threading
from types import SimpleNamespace
from ckpt_hub import Run
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
endpoint, out, what = sys.argv[1:]
run = Run(out, SimpleNamespace(endpoint=endpoint), strategy="checkpoint", always_push=True)
run.settle()
print("made", flush=True)
if what == "end":
    sys.stdin.readline()
    run.save(1)
    run.finish()
elif what == "noting":
    signal.signal(signal.SIGTERM, lambda number, frame: print("noted", flush=True))
    sys.stdin.readline()
    run.save(1)
    run.finish()
elif what == "fork":
    sys.stdin.readline()
    run.save(1)
    child = os.fork()
    if child == 0:
        sys.exit(7)  # through the interpreter's end
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.stdin.readline()
elif what == "exit":
    sys.stdin.readline()
    run.save(1)
    for name in ("one", "two"):
        (run.output_dir / f"{name}.safetensors").write_bytes(name.encode())
    run.callback.push_to_hub(out, "Without waiting", blocking=False)
print("left", flush=True)
"""


@pytest.fixture
def start(hub, tmp_path):
    """Start a run in a process of its own, which goes on once a line is written to it."""
    started = []

    def begin(what):
        log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, hub.endpoint, str(tmp_path / "out"), what],
            env=environment(hub, tmp_path / "home"),
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        os.close(log)
        started.append(process)
        wait_until(lambda: "made" in output() or process.poll() is not None, 60)
        return process

    def output():
        return (tmp_path / "log").read_text()

    yield begin, output
    for process in started:
        process.kill()
        process.wait(30)
        process.stdin.close()


def go_on(process):
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_ends_the_wait_with_a_summary(number, hub, tmp_path, start):
    begin, output = start
    process = begin("end")
    gate = hub.hold("POST", "/commit/")
    go_on(process)
    wait_until(lambda: "waiting for 1 push" in output(), 60)
    process.send_signal(number)
    assert process.wait(20) in (-number, 1 if number == signal.SIGINT else -number)
    text = output()
    assert "ERROR not all of the run is at" in text
    assert "not pushed: 'Training in progress, step 1', 'End of training'" in text
    assert ("KeyboardInterrupt" in text) is (number == signal.SIGINT)
    assert "left" not in text
    assert not list((tmp_path / "out").glob(".tmp-*"))
    gate.set()


def test_a_signal_that_others_only_note_ends_the_wait_and_the_process_with_its_code(hub, start):
    begin, output = start
    process = begin("noting")
    gate = hub.hold("POST", "/commit/")
    go_on(process)
    wait_until(lambda: "waiting for 1 push" in output(), 60)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert "noted" in output()
    assert "ERROR not all of the run is at" in output()
    gate.set()


def test_a_signal_that_comes_twice_at_once_is_one_request(monkeypatch):
    monkeypatch.setattr(push_queue, "_REPEATED_WITHIN_S", 100.0)
    with push_queue.interrupts(after_signal=True) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught == []
    monkeypatch.setattr(push_queue, "_REPEATED_WITHIN_S", 0.0)
    former = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with pytest.raises(SystemExit), push_queue.interrupts(after_signal=True) as caught:
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert caught == [signal.SIGTERM], "later it is another request"
    with pytest.raises(KeyboardInterrupt), push_queue.interrupts(after_signal=True):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_is_ignored_stays_so():
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with push_queue.interrupts() as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught == []
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        with pytest.raises(SystemExit), push_queue.interrupts() as caught:
            signal.raise_signal(signal.SIGTERM)
        assert caught == [signal.SIGTERM], "one that is handled is noted"
    finally:
        signal.signal(signal.SIGTERM, former)


def test_the_process_waits_at_its_end_for_pushes_in_the_background(hub, start):
    """Several large files, for which the client starts threads of its own."""
    begin, output = start
    process = begin("exit")
    gate = hub.hold("POST", "/commit/")
    go_on(process)
    wait_until(lambda: "waiting up to 600 s for" in output(), 60)
    gate.set()
    assert process.wait(60) == 0
    if (3, 12) <= sys.version_info < (3, 12, 3):  # the client's threads cannot start there, which the log says
        assert "'Without waiting' was not pushed to ci/run: RuntimeError: can't create new thread" in output()
        return
    assert hub.titles("ci/run")[1:] == ["Training in progress, step 1", "Without waiting"]
    assert {"one.safetensors", "two.safetensors"} <= set(hub.files("ci/run"))


def test_where_no_thread_can_be_started_pushes_run_at_once_and_in_order(monkeypatch, caplog):
    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    queue, pushed = push_queue.PushQueue(3, lambda left: 60.0), []

    def push(label, work):
        return queue.submit(push_queue.Push(label, work))

    both = push("first", lambda: (pushed.append("first"), push("second", lambda: pushed.append("second"))))
    assert both.result(0) is not None
    assert push("third", lambda: 1 / 0).exception(0).args == ("division by zero",)
    assert pushed == ["first", "second"]
    assert not queue.is_busy()
    assert [label for label, _ in queue.failures] == ["third"]
    assert "'first' is pushed in the foreground: can't create new thread" in caplog.text

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push("fourth", interrupt)
    assert not queue.is_busy(), "the end of the process waits for nothing"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_waits_for_no_push(hub, start):
    begin, output = start
    process = begin("fork")
    gate = hub.hold("POST", "/commit/")
    go_on(process)
    wait_until(lambda: "child 7" in output() or process.poll() is not None, 60)
    assert "child 7" in output()
    gate.set()
    go_on(process)
    assert process.wait(60) == 0
