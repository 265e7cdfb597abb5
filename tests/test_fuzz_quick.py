"""A part of `nox -s fuzz`: 25 random runs. `nox -s fuzz -- --faults` shows that such runs find planted faults."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parent / "campaigns" / "fuzz" / "run.py"


def fuzz(*arguments):
    command = [sys.executable, str(FUZZ), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_25_random_runs_are_those_that_were_described():
    done = fuzz("--seed", 11, "--n", 25)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "runs 25, discrepancies 0"
    compared = re.findall(r"^    (\d+) compared with (.*)$", done.stdout, re.M)
    for oracle in ("transformers", "by hand", "uninterrupted"):
        assert sum(int(count) for count, name in compared if name == oracle) >= 2


@pytest.mark.slow
def test_40_random_runs_on_meshes_are_those_of_one_process():
    done = fuzz("--seed", 4, "--n", 40, "--family", "meshes")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == "runs 40, discrepancies 0"


@pytest.mark.slow
def test_one_run_is_repeated_from_its_line():
    done = fuzz("--repeat", "Run(model='mlp', accumulation=2, habits=(('halve_the_weights', 1),))")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "1 compared with transformers\n    1 compared with by hand\n" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("line", ["Run(habits=(('no_such_habit', 0),))", "Run(model='none')"])
def test_a_run_that_is_none_is_an_error(line):
    done = fuzz("--repeat", line)
    assert done.returncode == 1
    assert "KeyError" in done.stdout
