"""`notebook_launcher`: processes that are copies of this one, and what is said when one of them fails."""

import os
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkProcess

import pytest
import torch

from tr_dist import DDP, notebook_launcher
from tr_dist.launching import notebook
from tr_dist.launching.notebook import NotebookError


def compute_with_threads():
    """Do what leaves threads behind, for which a copied process would wait."""
    torch.set_num_threads(4)
    layer = torch.nn.Linear(512, 512)
    layer(torch.randn(512, 512)).pow(2).mean().backward()
    torch.randn(500_000).sort()


def train(model, folder):
    with DDP(use_cpu=True) as strategy:
        replica = strategy.prepare(model)
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        data = torch.arange(8.0).reshape(8, 1) / 8
        for _ in range(3):
            with strategy.accumulate(replica, sync=True):
                strategy.backward((replica(data[strategy.rank :: strategy.world_size]) - 1).pow(2).mean())
            strategy.step(optimizer)
            optimizer.zero_grad()
        (folder / f"{strategy.rank}_of_{strategy.world_size}").write_text(f"{model.weight.item():.6f}")


def built():
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1)


def test_a_model_built_before_is_trained_by_two_processes_as_by_one(tmp_path):
    compute_with_threads()
    notebook_launcher(train, (built(), tmp_path), num_processes=1)  # leaves a group behind, as cells do
    model = built()
    before = model.weight.item()
    notebook_launcher(train, (model, tmp_path), num_processes=2)
    assert model.weight.item() == before  # each process has its own
    notebook_launcher(train, (model, tmp_path), num_processes=1)
    alone = (tmp_path / "0_of_1").read_text()
    assert [(tmp_path / f"{rank}_of_2").read_text() for rank in range(2)] == [alone, alone]


def test_a_function_of_a_cell_needs_no_file(tmp_path):
    def say():
        (tmp_path / os.environ["RANK"]).write_text(os.environ.get("ACCELERATE_MIXED_PRECISION", ""))

    notebook_launcher(say, num_processes=3, mixed_precision="bf16")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "bf16", "1": "bf16", "2": "bf16"}


def test_the_first_cause_comes_with_its_traceback():
    def fail():
        if os.environ["RANK"] == "1":
            raise ArithmeticError("one fails")
        time.sleep(60)

    with pytest.raises(NotebookError) as caught:
        notebook_launcher(fail, num_processes=2)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 failed first: it ended with exit code 1\nTraceback")
    assert "ArithmeticError: one fails" in text
    assert "rank 0" not in text


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_memory_that_runs_out_is_said_in_words(number):
    def die():
        if os.environ["RANK"] == "0":
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        time.sleep(60)

    with pytest.raises(
        NotebookError, match=rf"was ended by {number.name}.*(?s:.)*notebook_launcher\(training_function, "
    ):
        notebook_launcher(die, num_processes=2)


def test_a_rank_that_exits_says_its_code():
    with pytest.raises(NotebookError, match="rank 0 of 2 failed first: it ended with exit code 3"):
        notebook_launcher(lambda: sys.exit(3), num_processes=2)


def test_cuda_that_was_used_before_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(NotebookError, match="CUDA was used in this notebook before"):
        notebook_launcher(print, num_processes=2)


def test_a_group_that_is_open_is_refused():
    with DDP(use_cpu=True), pytest.raises(NotebookError, match="this process is in a process group"):
        notebook_launcher(print, num_processes=2)


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"num_processes=3, but 2 GPU\(s\) are visible"):
        notebook_launcher(print, num_processes=3)


def test_a_launched_process_launches_no_others(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(NotebookError, match="already one of 2 processes"):
        notebook_launcher(print, num_processes=2)


def test_a_system_without_fork_is_told_what_to_use(monkeypatch):
    monkeypatch.delattr(notebook.os, "fork")
    with pytest.raises(NotebookError, match="trainer launch"):
        notebook_launcher(print, num_processes=2)


@pytest.mark.parametrize("given", [{"num_processes": 0}, {"mixed_precision": "fp8"}])
def test_values_out_of_range_are_refused(given):
    with pytest.raises(ValueError, match="must be at least 1|is not known"):
        notebook_launcher(print, **given)


INTERRUPTED = """
import os, signal, sys, time
from tr_dist import notebook_launcher

def wait():
    try:
        os.write(1, b"ready ")
        time.sleep(60)
    except KeyboardInterrupt:
        os.write(1, b"told ")
        raise

try:
    notebook_launcher(wait, num_processes=2)
except KeyboardInterrupt:
    os.write(1, b"interrupted")
"""


def test_an_interrupt_reaches_each_process_once(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout.read(12) == b"ready ready "
            os.killpg(process.pid, signal.SIGINT)
            rest = process.communicate(timeout=60)[0]
        finally:
            process.kill()
    assert rest == b"told told interrupted"


INTERRUPTED_EARLY = """
import os, signal, sys, time
from multiprocessing import popen_fork
from tr_dist import notebook_launcher

launch = popen_fork.Popen._launch

def launch_and_interrupt(self, process):
    launch(self, process)
    os.write(1, b"started ")
    os.killpg(0, signal.SIGINT)

popen_fork.Popen._launch = launch_and_interrupt
try:
    notebook_launcher(time.sleep, (600,), num_processes=2)
except KeyboardInterrupt:
    os.write(1, b"interrupted")
"""


def test_an_interrupt_while_processes_start_ends_them_too(tmp_path):
    script = tmp_path / "interrupted_early.py"
    script.write_text(INTERRUPTED_EARLY)
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            said, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (said, errors) == (b"started started interrupted", b"")


def test_processes_that_were_started_end_when_another_cannot_be(tmp_path, monkeypatch):
    started = []

    def start(self, start=ForkProcess.start):
        if started:
            raise OSError("Resource temporarily unavailable")
        start(self)
        started.append(self)

    monkeypatch.setattr(ForkProcess, "start", start)
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        notebook_launcher(time.sleep, (600,), num_processes=2)
    assert started[0].exitcode == -signal.SIGTERM
