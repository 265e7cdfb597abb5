"""A part of `nox -s crash`: enough to notice when saving or resuming is broken."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(os, "fork"), reason="faults are forks of a process that has everything imported"
)

RUN = Path(__file__).parent / "campaigns" / "crash" / "run.py"
CAMPAIGNS = ("operations", "steps", "power", "damage")


def crash_session(*arguments):
    command = [sys.executable, str(RUN), "--quick", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)


def faults_without_mismatch(names):
    """Do a part of some campaigns; return how many faults each had, none of which was seen in the end."""
    done = crash_session(*(argument for name in names for argument in ("--only", name)))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = dict(re.findall(r"^([\w -]+?) +([\d,]+) +0 +[\d.]+  \w", done.stdout, re.M))
    rows = {name: int(faults.replace(",", "")) for name, faults in rows.items()}
    assert set(rows) == set(names)
    assert all(rows.values())
    last = done.stdout.strip().splitlines()[-1]
    assert last == f"faults {sum(rows.values())}, mismatches 0"
    return rows


def broken_session(change, name):
    """Do a part of a campaign after a change for the worse."""
    program = (
        "import runpy, sys\n"
        f"sys.path[:0] = {[str(RUN.parent), *map(str, RUN.parents[1:3])]!r}\n"
        f"{change}\n"
        f"sys.argv = ['run.py', '--quick', '--only', {name!r}]\n"
        f"runpy.run_path({str(RUN)!r}, run_name='__main__')\n"
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=900, check=False)


def test_a_run_that_is_broken_anywhere_ends_as_one_that_was_left_alone():
    assert faults_without_mismatch(CAMPAIGNS)["power"] > 500


@pytest.mark.slow
def test_a_run_with_any_optimizer_that_is_killed_ends_as_one_that_was_left_alone():
    rows = faults_without_mismatch(("optimizers", "ranks"))
    assert min(rows.values()) >= 8


@pytest.mark.slow
def test_code_that_is_broken_on_purpose_is_noticed():
    done = crash_session("--only", "mutations")
    assert done.returncode == 0, done.stdout + done.stderr
    noticed = re.findall(r"^    1 (.*): noticed by (.*)$", done.stdout, re.M)
    assert len(noticed) >= 3
    assert f"faults {len(noticed)}, mismatches 0" in done.stdout


@pytest.mark.slow
def test_the_session_fails_when_a_folder_is_not_synced():
    """As its user sees it: it says what went wrong, counts it, and exits with 1."""
    done = broken_session("from tr_ckpt import files; files.fsync_parents = lambda path: None", "power")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "  WRONG END power cut in a run" in done.stdout
    assert re.search(r"^faults [\d]+, mismatches [1-9]\d*$", done.stdout, re.M)


FORGET = """
import crash_optimizers, runner
from tr_optim import GaLoreAdamW
runner.chosen = lambda cases, group, options: cases[7::15]
crash_optimizers.SETTINGS = [s for s in crash_optimizers.SETTINGS if str(s) == "galore_adamw_layerwise"]
load = GaLoreAdamW.load_state_dict
def forget(self, state):
    load(self, state)
    for held in self.state.values():
        {what}
GaLoreAdamW.load_state_dict = forget
"""


@pytest.mark.slow
@pytest.mark.parametrize("campaign", ["optimizers", "ranks"])
@pytest.mark.parametrize(
    "what",
    [
        'held.pop("basis_left", None), held.pop("basis_right", None)',
        'held.update(exp_avg=held["exp_avg"] * (1 + 2**-23))',
        'held["step"].add_(3)',
    ],
)
def test_the_session_fails_when_a_part_of_an_optimizers_state_is_not_what_it_was(campaign, what):
    done = broken_session(FORGET.replace("{what}", what), campaign)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "  WRONG END galore_adamw_layerwise, " in done.stdout
