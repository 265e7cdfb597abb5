"""A part of `nox -s robustness`: enough to notice when runs no longer end, fail or go on as they should."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="ranks are forks of a process that has everything imported"
)

FOLDER = Path(__file__).parent / "campaigns" / "robustness"


def last_line(script, *arguments):
    """Run a script of the session; return its last line, when it has found nothing wrong."""
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_jobs_of_two_and_three_ranks_end_with_exit_code_0():
    assert last_line("clean_exits.py", "--runs", 2) == "2 of 2 jobs ended with exit code 0"


def test_a_failing_rank_ends_all_and_says_why_first():
    assert last_line("failures.py", "--every", 14) == "2 failures, 0 judged wrong"


@pytest.mark.slow
def test_a_run_of_which_a_rank_was_killed_ends_as_one_left_alone():
    assert last_line("kills.py", "--every", 18, "--way", "saving") == "4 kills, 0 judged wrong"
