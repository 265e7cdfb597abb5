"""A part of `nox -s crash`: enough to notice when saving or resuming is broken."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="faults are forks of a process that has everything imported"),
    pytest.mark.slow,
]

RUN = Path(__file__).parent / "crash" / "run.py"
CAMPAIGNS = ("operations", "torn", "replacing", "steps", "twice", "disk", "power", "recovery", "damage")


def crash_session(*arguments):
    command = [sys.executable, str(RUN), "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_a_run_that_is_broken_anywhere_ends_as_one_that_was_left_alone():
    done = crash_session(*(argument for name in CAMPAIGNS for argument in ("--only", name)))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(re.findall(r"^([\w -]+?)  .*  ([\d,]+) +0 +[\d.]+$", done.stdout, re.M))
    rows = {name: int(faults.replace(",", "")) for name, faults in rows.items()}
    assert set(rows) == set(CAMPAIGNS)
    assert all(rows.values())
    assert rows["power"] > 1000
    last = done.stdout.strip().splitlines()[-1]
    assert last == f"faults {sum(rows.values())}, mismatches 0"


def test_code_that_is_broken_on_purpose_is_noticed():
    done = crash_session("--only", "mutations")
    assert done.returncode == 0, done.stdout + done.stderr
    noticed = re.findall(r"^mutations: 1 (.*): noticed by (.*)$", done.stdout, re.M)
    assert len(noticed) >= 3
    assert f"faults {len(noticed)}, mismatches 0" in done.stdout


def test_the_session_fails_when_a_folder_is_not_synced():
    """As its user sees it: it says what went wrong, counts it, and exits with 1."""
    program = (
        "import runpy, sys\n"
        "from tr_ckpt import files\n"
        "files.settle = lambda path: None\n"
        "sys.argv = ['run.py', '--quick', '--only', 'power']\n"
        f"runpy.run_path({str(RUN)!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "  MISMATCH power cut in a run" in done.stdout
    assert re.search(r"^faults [\d]+, mismatches [1-9]\d*$", done.stdout, re.M)
