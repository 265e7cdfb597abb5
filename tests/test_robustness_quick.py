"""A part of `nox -s robustness`: enough to notice when runs no longer end, fail or go on as they should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="ranks are forks of a process that has everything imported"
)

RUN = Path(__file__).parent / "campaigns" / "robustness" / "run.py"


def last_line(group):
    """Run a part of a group of the session; return its last line, when it has found nothing wrong."""
    command = [sys.executable, str(RUN), "--quick", "--only", group]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_jobs_of_two_and_three_ranks_end_with_exit_code_0():
    assert last_line("exits") == "jobs 2, judged wrong 0"


def test_a_failing_rank_ends_all_and_says_why_first():
    assert last_line("failures") == "jobs 2, judged wrong 0"


@pytest.mark.slow
def test_a_run_of_which_a_rank_was_killed_ends_as_one_left_alone():
    assert last_line("kills") == "jobs 5, judged wrong 0"
