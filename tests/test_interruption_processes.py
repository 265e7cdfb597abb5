"""Send signals to real processes, alone, in a group and under a launcher, and look at exit codes and what is left."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import interrupted_run

SLOW = pytest.mark.slow

SCRIPT = Path(__file__).parent / "interrupted_run.py"
LIMIT_S = 150


class Process:
    """A running script; its lines are read as they come."""

    def __init__(self, *arguments, command=(), **variables):
        # The variables of a launcher that the tests themselves may run under are not for it.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")}
        self._process = subprocess.Popen(
            [*(command or (sys.executable, str(SCRIPT))), *map(str, arguments)],
            env={**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._killer = threading.Timer(LIMIT_S, self.kill)
        self._killer.start()
        self._errors = []
        self._reader = threading.Thread(target=lambda: self._errors.extend(self._process.stderr))
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.kill()
        self._process.wait()
        self._killer.cancel()
        self._reader.join()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.stderr.close()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def go_on(self):
        """Let it leave the step in which it waits."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def wait_for(self, line):
        """Return the line that begins so, with those before it."""
        lines = []
        for found in self._process.stdout:
            lines.append(found)
            if found.startswith(line):
                return found, lines
        raise AssertionError(f"{line!r} never came: {lines}, {self.errors()}")

    def end(self):
        """Return the exit code and the lines that were not read yet."""
        lines = self._process.stdout.read()
        return self._process.wait(), lines

    def errors(self):
        self._reader.join()
        return "".join(self._errors)


def workers_in(line):
    return [int(number) for number in re.findall(r"\d+", line.partition("workers")[2])]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_gone(pids, within_s=30):
    deadline = time.monotonic() + within_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def checkpoints(folder):
    return sorted(path.name for path in Path(folder).iterdir() if "checkpoint" in path.name)


def end_of(folder, *arguments):
    """Run the script to its end, in this process; return the weights."""
    interrupted_run.main([str(folder), "--end", str(folder / "end.pt"), *map(str, arguments)])
    return torch.load(folder / "end.pt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights of a run that nobody disturbed."""
    return end_of(tmp_path_factory.mktemp("whole"))


def assert_goes_on_to(whole, folder, *arguments):
    for mine, theirs in zip(end_of(folder, *arguments), whole, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("number", "code", "how"),
    [
        (signal.SIGTERM, 143, []),
        pytest.param(signal.SIGTERM, 143, ["--save_async"], marks=SLOW),
        pytest.param(signal.SIGUSR1, 138, [], marks=SLOW),
        (signal.SIGINT, 130, []),
    ],
)
def test_a_signalled_process_saves_and_ends_with_its_exit_code(tmp_path, whole, number, code, how):
    with Process(tmp_path, "--wait_at", 3, *how) as run:
        run.wait_for("begin 3")
        os.kill(run.pid, number)
        run.go_on()
        found, lines = run.end()
        assert found == code, run.errors()
    kind = "KeyboardInterrupted" if number == signal.SIGINT else "Interrupted"
    assert lines.splitlines() == ["saved 4", f"end 4 {kind}"]
    assert checkpoints(tmp_path) == ["checkpoint-4"]
    assert f"{number.name}: stopping with exit code {code} at step 4 of 30" in run.errors()
    assert "Traceback" not in run.errors()
    if number == signal.SIGTERM:
        assert_goes_on_to(whole, tmp_path, *how)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=SLOW), pytest.param(signal.SIGUSR1, marks=SLOW)]
)
def test_a_signal_to_the_whole_group_leaves_the_workers_to_their_parent(tmp_path, whole, number):
    with Process(tmp_path, "--workers", 2, "--wait_at", 3) as run:
        line, _ = run.wait_for("begin 3")
        os.killpg(run.pid, number)
        time.sleep(0.5)  # for what a worker might do
        run.go_on()
        code, lines = run.end()
        assert code == 128 + number, run.errors()
    assert lines.startswith("saved 4\n")
    assert checkpoints(tmp_path) == ["checkpoint-4"]
    assert len(workers_in(line)) == 2
    assert all_gone(workers_in(line))
    if number == signal.SIGTERM:
        assert_goes_on_to(whole, tmp_path, "--workers", 2)


@pytest.mark.parametrize(
    ("first", "second", "apart_s"),
    [
        pytest.param(signal.SIGTERM, signal.SIGTERM, 1.5, marks=SLOW),
        (signal.SIGINT, signal.SIGINT, 0.5),
        pytest.param(signal.SIGUSR1, signal.SIGTERM, 0.5, marks=SLOW),
    ],
)
def test_a_second_signal_ends_the_process_and_its_workers_at_once(tmp_path, first, second, apart_s):
    with Process(tmp_path, "--workers", 2, "--wait_at", 3) as run:
        line, _ = run.wait_for("begin 3")
        os.kill(run.pid, first)
        time.sleep(apart_s)
        assert is_alive(run.pid)
        os.kill(run.pid, second)
        code, lines = run.end()
    assert code == 128 + second
    assert f"{second.name}, the second signal: stopping at once" in run.errors()
    assert lines == ""
    assert checkpoints(tmp_path) == []
    assert len(workers_in(line)) == 2
    assert all_gone(workers_in(line))


@contextlib.contextmanager
def two_ranks(folder, *arguments):
    meet = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TR_RENDEZVOUS_FILE": str(folder / "meet")}
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Process(folder / "out", *arguments, **meet, RANK=str(rank), LOCAL_RANK=str(rank)))
            for rank in range(2)
        ]


@pytest.mark.launcher
@pytest.mark.parametrize("signalled", [pytest.param(0, marks=SLOW), 1])
def test_a_signal_to_one_process_of_two_ends_both_with_one_checkpoint_and_its_code(tmp_path, signalled):
    with two_ranks(tmp_path, "--wait_at", 3) as ranks:
        for rank in ranks:
            rank.wait_for("begin 3")
        os.kill(ranks[signalled].pid, signal.SIGTERM)
        for rank in ranks:
            rank.go_on()
        ends = [rank.end() for rank in ranks]
        assert [code for code, _ in ends] == [143, 143], ranks[0].errors() + ranks[1].errors()
    assert [lines.splitlines()[-2:] for _, lines in ends] == [["saved 5", "end 5 Interrupted"]] * 2
    assert checkpoints(tmp_path / "out") == ["checkpoint-5"]


@pytest.mark.launcher
@SLOW
def test_torchrun_that_is_told_to_stop_leaves_one_checkpoint_of_one_step(tmp_path):
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(SCRIPT))
    with Process(tmp_path / "out", "--workers", 1, "--step_s", 0.3, command=torchrun) as run:
        _, lines = run.wait_for("begin 3")
        os.kill(run.pid, signal.SIGTERM)
        code, rest = run.end()
        assert len(checkpoints(tmp_path / "out")) == 1, run.errors()
    assert code == 1  # of torchrun, whatever its processes ended with
    [saved] = checkpoints(tmp_path / "out")
    step = saved.removeprefix("checkpoint-")
    assert rest.count(f"saved {step}\n") == rest.count(f"end {step} Interrupted\n") == 2
    begun = [line for line in [*lines, *rest.splitlines()] if line.startswith("begin")]
    processes = {int(line.split()[3]) for line in begun}
    assert len(processes) == 2
    assert all_gone(processes | {worker for line in begun for worker in workers_in(line)})
