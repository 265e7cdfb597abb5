"""A launcher that is killed leaves no rank: each saves and ends, or is killed, and a job that follows takes over."""

import os
import sys
import time
from pathlib import Path

import pytest
from launched_jobs import TRAINER, end_of, free_port, start

pytestmark = [
    pytest.mark.launcher,
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc"),
]

SCRIPT = Path(__file__).parent / "orphaned_run.py"
LIMIT_S = 240


def launch(folder, place, *options, stubborn=()):
    folder.mkdir(exist_ok=True)
    return start([TRAINER, "launch", "--nproc", "2", *options, SCRIPT, folder, place, *stubborn])


def ranks_of(folder, prefix="rank"):
    return [int(path.name.removeprefix(f"{prefix}-")) for path in folder.glob(f"{prefix}-*")]


def wait_until(condition):
    deadline = time.monotonic() + LIMIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)
    return found


def is_running(number):
    try:
        return Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def killed_at(folder, place, *options, stubborn=()):
    """Kill the launcher when both ranks are at a place; return all ranks there were, all of which end, and the log."""
    job = launch(folder, place, *options, stubborn=stubborn)
    several = 1 if place == "saving" else 2  # a checkpoint is announced on the first rank
    wait_until(lambda: len(ranks_of(folder, "reached")) == several or job.poll() is not None)
    job.kill()
    _, _, errors = end_of(job)
    numbers = ranks_of(folder)
    wait_until(lambda: not any(map(is_running, numbers)))
    return numbers, errors


@pytest.mark.parametrize("place", ["start", "rendezvous"])
def test_ranks_that_have_not_begun_to_train_end_at_once(tmp_path, place):
    numbers, _ = killed_at(tmp_path / "job", place)
    assert len(numbers) == 2
    assert not (tmp_path / "job" / "out").exists()


@pytest.mark.parametrize("place", ["training", "saving", "evaluation"])
def test_ranks_that_train_save_and_end(tmp_path, place):
    numbers, errors = killed_at(tmp_path / "job", place)
    assert len(numbers) == 2
    assert errors.count("SIGTERM: stopping with exit code 143") == 2, errors
    assert os.listdir(tmp_path / "job" / "out")
    assert not (tmp_path / "job" / "out" / ".run-lock.json").exists()


def test_ranks_that_take_no_notice_are_killed(tmp_path):
    numbers, _ = killed_at(tmp_path / "job", "training", "--stop_timeout", "2", stubborn=["--stubborn"])
    assert len(numbers) == 2


def test_a_job_that_follows_at_once_takes_over_from_what_the_ranks_saved(tmp_path):
    folder = tmp_path / "job"
    job = launch(folder, "training")
    wait_until(lambda: len(ranks_of(folder, "reached")) == 2 or job.poll() is not None)
    old = ranks_of(folder)
    job.kill()
    again = launch(folder, "nowhere")
    wait_until(lambda: len(ranks_of(folder)) == 4 or again.poll() is not None)
    code, output, errors = end_of(again)
    assert code == 0, errors
    assert output.endswith("complete 8 4\n")
    assert not any(map(is_running, old))
    end_of(job)
    assert not (folder / "out" / ".run-lock.json").exists()
    assert sorted(path.name for path in (folder / "out").glob("checkpoint-*"))[-1] == "checkpoint-8"


def test_of_two_machines_the_other_ends_too_when_the_launcher_of_one_is_killed(tmp_path):
    folder, port = tmp_path / "job", free_port()
    folder.mkdir()
    meeting = ("--nnodes", "2", "--nproc", "1", "--master_addr", "127.0.0.1", "--master_port", str(port))
    jobs = [
        start([TRAINER, "launch", *meeting, "--node_rank", str(node), SCRIPT, folder, "training"]) for node in (0, 1)
    ]
    wait_until(lambda: len(ranks_of(folder, "reached")) == 2 or any(job.poll() is not None for job in jobs))
    jobs[1].kill()
    code, _, errors = end_of(jobs[0])
    end_of(jobs[1])
    assert code != 0, errors
    numbers = ranks_of(folder)
    wait_until(lambda: not any(map(is_running, numbers)))
    assert len(numbers) == 2


NOTEBOOK = """
import os, runpy, sys
from tr_dist import notebook_launcher
sys.argv = sys.argv[1:]
print(os.getpid(), flush=True)
notebook_launcher(lambda: runpy.run_path(sys.argv[0], None, "__main__"), num_processes=2)
"""


def test_ranks_of_a_notebook_that_is_killed_save_and_end(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    job = start([sys.executable, "-c", NOTEBOOK, SCRIPT, folder, "training"])
    wait_until(lambda: len(ranks_of(folder, "reached")) == 2 or job.poll() is not None)
    job.kill()
    _, _, errors = end_of(job)
    numbers = ranks_of(folder)
    wait_until(lambda: not any(map(is_running, numbers)))
    assert errors.count("SIGTERM: stopping with exit code 143") == 2, errors


def test_what_launched_a_launcher_may_go(tmp_path):
    """As after `nohup trainer launch ... &` in a terminal that is closed."""
    folder = tmp_path / "job"
    folder.mkdir()
    starter = "import subprocess, sys; subprocess.Popen(sys.argv[1:])"
    words = [TRAINER, "launch", "--nproc", "2", str(SCRIPT), str(folder), "training"]
    _, output, errors = end_of(start([sys.executable, "-c", starter, *words]))
    assert output.endswith("complete 8 2\n"), errors
