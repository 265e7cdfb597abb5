"""How a job under `trainer launch` ends: a rank fails or is killed, a signal comes, ranks are started again."""

import os
import signal
import socket

import pytest
from launched_jobs import SCRIPT, TRAINER, end_of, free_port, run, said, start, training

pytestmark = [pytest.mark.launcher, pytest.mark.slow]

FAILING = """
import os, sys, time
import torch
from tr_dist import DDP
with DDP(use_cpu=True) as strategy:
    strategy.sum(torch.ones(1))
    if strategy.rank == 1:
        raise ArithmeticError("rank 1 fails of itself")
    while True:
        strategy.sum(torch.ones(1))
"""


def test_a_failing_rank_ends_all_and_its_traceback_comes_first_in_the_report(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    code, _, errors = run([TRAINER, "launch", "--nproc", "2", script])
    assert code == 1  # and nobody waited for a timeout of half an hour, which is longer than a job may take here
    report = errors.partition("trainer launch: ")[2]
    assert report.startswith("rank 1 of 2 failed first: it ended with exit code 1\nTraceback (most recent call last):")
    assert report.index("ArithmeticError: rank 1 fails of itself") < report.find("then rank 0") or "then" not in report


def test_a_signal_is_passed_on_and_the_run_saves(tmp_path):
    saving = ("--save_strategy", "steps", "--save_steps", "100", "--use_cpu", "--wait_at", "1")
    job = start([TRAINER, "launch", "--nproc", "2", SCRIPT, *training(tmp_path, 2), *saving])
    _wait_for(job, '{"waits": 1}')
    job.send_signal(signal.SIGTERM)
    code, _, errors = end_of(job)
    assert code == 143, errors
    assert "SIGTERM was passed on to 2 rank(s), which ended with exit code 143, 143" in errors
    assert errors.count("a second one stops at once") == 1
    # Seen in the second step; ranks agree one step later.
    assert [path.name for path in tmp_path.glob("checkpoint-*")] in (["checkpoint-2"], ["checkpoint-3"])


def _wait_for(job, line):
    seen = []
    for found in job.stdout:
        seen.append(found)
        if found.strip() == line:
            return
    raise AssertionError((seen, job.stderr.read()))


def test_ranks_that_are_started_again_go_on_from_the_checkpoint(tmp_path, losses_alone):
    numbers = ("--save_strategy", "steps", "--save_steps", "1", "--resume_from_checkpoint", "auto")
    command = [TRAINER, "launch", "--nproc", "2", "--max_restarts", "1", "--log_dir", tmp_path / "logs", SCRIPT]
    code, _, errors = run([*command, *training(tmp_path, 2), *numbers, "--use_cpu", "--die_at", "2"])
    assert code == 0, errors
    assert "rank 1 of 2 failed first: it was ended by SIGKILL" in errors
    assert "starting all ranks again, restart 1 of 1" in errors
    log = (tmp_path / "logs" / "rank_0.log").read_text()
    (end,) = said(log)
    assert end["losses"] == pytest.approx(losses_alone, abs=1e-5)
    before, _, after = log.partition("--- restart 1\n")
    assert before.count("'loss'") in (2, 3)  # what step 3 logged depends on how far rank 0 came
    assert after.count("'loss'") == 2, log


def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [TRAINER, "launch", "--nproc", "2", "--master_addr", "127.0.0.1", "--master_port", port, SCRIPT]
        code, _, errors = run([*command, *training(tmp_path, 2)])
    assert code == 2
    assert f"127.0.0.1:{port}" in errors
    assert "Traceback" not in errors


HALF_DEAD = """
import os, sys, time
from pathlib import Path
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
(folder / str(rank)).touch()
while not all((folder / str(number)).exists() for number in range(2)):
    time.sleep(0.05)
if rank == int(sys.argv[2]):
    os.kill(os.getpid(), 9)
time.sleep(3600)  # in no exchange, as while it waits for a file of the other
"""


@pytest.mark.parametrize("killed", [0, 1])
def test_of_two_machines_one_ends_its_ranks_when_those_of_the_other_have_failed(tmp_path, killed):
    script = tmp_path / "half_dead.py"
    script.write_text(HALF_DEAD)
    place = ("--nnodes", "2", "--nproc", "1", "--master_addr", "127.0.0.1", "--master_port", free_port())
    jobs = [start([TRAINER, "launch", *place, "--node_rank", node, script, tmp_path, killed]) for node in range(2)]
    ends = [end_of(job) for job in jobs]
    assert [code for code, _, _ in ends] == ([137, 1] if killed == 0 else [1, 137]), ends
    said = ends[1 - killed][2]
    assert f"machine {killed}: rank {killed} of 2 failed first: it was ended by SIGKILL; stopping the ranks of" in said


def test_one_process_is_the_script_itself(tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("import os, sys\nprint(os.getpid(), sys.argv[1:], 'RANK' in os.environ)\nsys.exit(9)\n")
    job = start([TRAINER, "launch", script, "--devices", "0"])
    code, output, _ = end_of(job)
    assert code == 9
    assert output.split(maxsplit=1) == [str(job.pid), "['--devices', '0'] False\n"]
    assert os.name == "posix"
