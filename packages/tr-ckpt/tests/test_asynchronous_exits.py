"""Whichever way a script ends, the write under way ends first; a process that is forked meanwhile has none."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ckpt_parts import listed, parts, restored

from tr_ckpt import Checkpointer

TESTS = str(Path(__file__).parent)

# Nothing is written in the background before the main thread has ended: what is there afterwards was waited for.
BEGIN = """
import atexit, os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
from ckpt_parts import parts
from tr_ckpt import Checkpointer, files

original = files.write
def write(descriptor, data):
    while threading.current_thread() is not threading.main_thread() and {waits}:
        time.sleep(0.005)
    original(descriptor, data)

checkpointer = Checkpointer({directory!r}, asynchronous=True)
checkpointer.save(1, parts(10))
checkpointer.wait()
files.write = write
"""


def run(directory, script, waits="threading.main_thread().is_alive()"):
    begin = BEGIN.format(tests=TESTS, directory=str(directory), waits=waits)
    command = [sys.executable, "-W", "ignore", "-c", begin + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.slow),
        ("raise RuntimeError('on purpose')", 1),
        ("os.kill(os.getpid(), signal.SIGINT)", -2),
    ],
)
def test_a_script_that_ends_waits_for_the_write(ending, code, tmp_path):
    ended = run(tmp_path, f"checkpointer.save(2, parts(20))\n{ending}\n")
    assert ended.returncode == code, ended.stderr
    assert restored(tmp_path) == (2, 20)
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.parametrize(
    "ending", ["os._exit(9)", pytest.param("os.kill(os.getpid(), signal.SIGKILL)", marks=pytest.mark.slow)]
)
def test_a_process_that_is_killed_loses_the_write_under_way_alone(ending, tmp_path):
    ended = run(tmp_path, f"checkpointer.save(2, parts(20))\n{ending}\n", waits="True")
    assert ended.returncode in (9, -9), ended.stderr
    assert restored(tmp_path) == (1, 10)
    assert list(tmp_path.glob(".tmp-writing-checkpoint-2@*"))
    again = Checkpointer(tmp_path, asynchronous=True)
    again.save(3, parts(30))
    again.close()
    assert restored(tmp_path) == (3, 30)
    assert not list(tmp_path.glob(".tmp-*"))


PUSHED = """
import time
from pathlib import Path
from tr_ckpt.hub.push_queue import Push, PushQueue

def push(folder):
    def work():
        time.sleep(0.2)
        Path({pushed!r}).write_text(folder.name)
    queue.submit(Push("a push", work))

queue = PushQueue(3, lambda left: 60.0)
checkpointer.save(2, parts(20), on_commit=push)
"""


def test_the_push_of_a_checkpoint_that_is_written_at_the_end_is_waited_for(tmp_path):
    pushed = tmp_path / "pushed"
    ended = run(tmp_path / "run", PUSHED.format(pushed=str(pushed)), waits="not threading._SHUTTING_DOWN")
    assert ended.returncode == 0, ended.stderr
    assert pushed.read_text() == "checkpoint-2", ended.stderr


def test_a_save_while_the_interpreter_exits_is_made_at_once(tmp_path):
    ended = run(tmp_path, "atexit.register(lambda: checkpointer.save(2, parts(20)))\n", waits="False")
    assert ended.returncode == 0, ended.stderr
    assert restored(tmp_path) == (2, 20)


def test_a_failure_that_nobody_asks_about_is_in_the_log(tmp_path):
    script = """
def write(descriptor, data):
    raise OSError(28, "No space left on device")
files.write = write
checkpointer.save(2, parts(20))
"""
    ended = run(tmp_path, script)
    assert "in the background: OSError: [Errno 28] checkpoint-2 was not saved in" in ended.stderr
    assert restored(tmp_path) == (1, 10)


FORKED = """
go = threading.Event()
checkpointer.save(2, parts(20))
pid = os.fork()
if pid == 0:
    checkpointer.check()
    checkpointer.wait()
    assert not checkpointer._background.is_busy()
    assert checkpointer.steps() == [1], checkpointer.steps()
    mine = Checkpointer({other!r}, asynchronous=True)
    waits = False
    files.write = original
    mine.save(5, parts(50))
    mine.close()
    assert mine.steps() == [5]
    checkpointer.close()
    sys.exit(7)  # as a worker ends that knows nothing of all this: nothing may be waited for
_, status = os.waitpid(pid, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
assert checkpointer._background.is_busy()
go.set()
checkpointer.wait()
assert checkpointer.steps() == [1, 2]
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_has_no_write_and_leaves_that_of_its_parent_alone(tmp_path):
    script = FORKED.format(other=str(tmp_path / "other"))
    ended = run(tmp_path / "run", script, waits="not go.is_set()")
    assert ended.returncode == 0, ended.stderr
    assert restored(tmp_path / "run") == (2, 20)
    assert restored(tmp_path / "other") == (5, 50)


FORKED_AFTER_A_FAILURE = """
def write(descriptor, data):
    raise OSError(28, "No space left on device")
files.write = write
checkpointer.save(2, parts(20))
checkpointer._background.join()
pid = os.fork()
if pid == 0:
    checkpointer.check()
    os._exit(0)
_, status = os.waitpid(pid, 0)
assert status == 0
try:
    checkpointer.check()
except OSError:
    sys.exit(7)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_does_not_raise_the_failure_of_its_parent(tmp_path):
    ended = run(tmp_path, FORKED_AFTER_A_FAILURE)
    assert ended.returncode == 7, ended.stderr


LOADED = """
import torch
go = threading.Event()
rows = torch.utils.data.TensorDataset(torch.arange(40.0))
if __name__ == "__main__":
    checkpointer.save(2, parts(20))
    loader = torch.utils.data.DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork")
    assert sum(batch.sum().item() for (batch,) in loader) == 780
    assert checkpointer._background.is_busy()
    go.set()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_workers_that_are_forked_during_a_write_load_and_end(tmp_path):
    ended = run(tmp_path, LOADED, waits="not go.is_set()")
    assert ended.returncode == 0, ended.stderr
    assert restored(tmp_path) == (2, 20)
    assert not list(tmp_path.glob(".tmp-*"))


TRIED = """
import torch
from types import SimpleNamespace
big = {"t": torch.zeros(50_000)}
for asynchronous in (False, True):
    again = Checkpointer(checkpointer.directory, asynchronous=asynchronous)
    try:
        again.save(2, {**parts(20), "big": SimpleNamespace(state_dict=lambda: big)})
        again.wait()
    except OSError as error:
        print(asynchronous, type(error).__name__, error)
"""

LIMITED = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
files.write = original
{TRIED}
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs setrlimit")
def test_a_file_that_may_not_grow_is_reported_with_what_to_do(tmp_path):
    ended = run(tmp_path, LIMITED)
    assert ended.returncode == 0, ended.stderr
    for asynchronous in (False, True):
        assert (
            f"{asynchronous} OSError [Errno 27] checkpoint-2 was not saved in {tmp_path}: File too large"
            in ended.stdout
        )
    assert ended.stdout.count("raise the limit on the size of a file (ulimit -f), or save to another") == 2
    assert restored(tmp_path) == (1, 10)
    assert listed(tmp_path) == ["checkpoint-1"]


FORBIDDEN = f"""
checkpointer.directory.chmod(0o555)
files.write = original
if os.geteuid() == 0:  # to whom nothing is forbidden
    os.setuid(65534)
{TRIED}
"""


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="needs users")
def test_a_folder_that_may_not_be_written_to_is_reported_with_what_to_do():
    # Not pytest's folder: no other user may enter that.
    with tempfile.TemporaryDirectory() as above:
        directory = Path(above) / "run"
        Path(above).chmod(0o755)
        ended = run(directory, FORBIDDEN)
        directory.chmod(0o755)
        assert ended.returncode == 0, ended.stderr
        for asynchronous in (False, True):
            assert (
                f"{asynchronous} PermissionError [Errno 13] checkpoint-2 was not saved in {directory}: "
                "Permission denied"
            ) in ended.stdout
        assert ended.stdout.count("give this user the right to write there, or save to another folder") == 2
        assert listed(directory) == ["checkpoint-1"]
