"""Kill processes of `trainer launch --elastic`: the others go on, and the end has the bits of the run without kills."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("survivors_run.py")
STEPS = "160"
LIMIT_S = 240


class Job:
    """A job whose output goes to a file."""

    def __init__(self, folder, *options, steps=STEPS, script=SCRIPT):
        self.out = Path(folder, "out.log")
        trainer = Path(sys.executable).with_name("trainer")
        words = [trainer, "launch", *options, script, Path(folder, "run"), steps]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.began_s = time.monotonic()
        with self.out.open("w") as out:
            self.process = subprocess.Popen(
                list(map(str, words)), stdout=out, stderr=subprocess.STDOUT, env=environment
            )

    @property
    def text(self):
        return self.out.read_text()

    def wait_for(self, words, number=1):
        until_s = time.monotonic() + LIMIT_S
        while self.text.count(words) < number:
            assert time.monotonic() < until_s, self.text
            assert self.process.poll() is None, self.text
            time.sleep(0.02)

    def ranks(self):
        found = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, timeout=20)
        return list(map(int, found.stdout.split()))

    def end(self):
        """Return the exit code, and the set of what processes printed of weights and logs."""
        try:
            code = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.text) from None
        return code, set(re.findall(r"^END (\w+ \w+)$", self.text, re.M))


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """What a run without kills prints, on one process and on four, and the seconds that it takes on four."""
    together = set()
    for options in (["--nproc", "1"], ["--elastic", "--nproc", "4"]):
        job = Job(tmp_path_factory.mktemp("whole"), *options)
        code, ends = job.end()
        together |= ends
        assert code == 0, job.text
    assert len(together) == 1, job.text
    return together, time.monotonic() - job.began_s


def kill_one(job, drawn):
    ranks = job.ranks()
    if not ranks:
        return False
    os.kill(drawn.choice(ranks), signal.SIGKILL)
    return True


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
def test_kills_at_random_moments_change_no_bit(seed, whole, tmp_path):
    """Of four processes one is killed, or two; with restarts or without; some before they have met."""
    drawn = random.Random(seed)
    job = Job(tmp_path, "--elastic", "--nproc", "4", "--max_restarts", "3" if seed % 3 else "0")
    if seed % 5:
        job.wait_for("training begins")
    kills = 1 + seed % 2
    for _ in range(kills):
        time.sleep(drawn.uniform(0.0, 6.0))
        if "training finished" in job.text or not kill_one(job, drawn):
            break
    code, ends = job.end()
    wanted, unharmed_s = whole
    print(f"seed {seed}: {time.monotonic() - job.began_s - unharmed_s:.1f} s more than without kills")
    assert ends == wanted, job.text
    is_late = "after the run had ended" in job.text or "failed first" in job.text  # the kill came after the end
    assert code == 0 or is_late, job.text


def test_a_process_that_was_lost_is_taken_in_again(tmp_path):
    job = Job(tmp_path, "--elastic", "--nproc", "3", "--max_restarts", "1", steps="1000")
    job.wait_for("saved checkpoint")
    assert kill_one(job, random.Random(0))
    job.wait_for("restart 1 of 1")
    job.wait_for("3 of at most 3 processes train together", 2)
    job.process.terminate()
    assert job.end()[0] == 143
    assert "SIGTERM was passed on to 3 rank(s), which ended with exit code 143, 143, 143" in job.text


def test_a_process_that_fails_by_itself_ends_the_job_once_no_restart_is_left(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(SCRIPT.read_text().replace("time.sleep(0.01)", "raise KeyError('of its own')"))
    job = Job(tmp_path, "--elastic", "--nproc", "2", script=script)
    assert job.end() == (1, set())
    assert "KeyError: 'of its own'" in job.text


def test_other_strategies_are_refused(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(re.sub(r"elastic=.*\n|virtual_shards=.*\n", "", SCRIPT.read_text()))
    job = Job(tmp_path, "--elastic", "--nproc", "2", script=script)
    assert job.end()[0] == 1
    assert "trainer launch --elastic needs a run whose processes may come and go: elastic='bitwise'" in job.text
