"""A part of `nox -s attack`, and what its mutations change: it must be there, or a check would seem to be noticed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ATTACK = ROOT / "tests" / "campaigns" / "attack"
MUTATIONS = tomllib.loads((ATTACK / "mutations.toml").read_text("utf-8"))["mutation"]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation["what"])
def test_what_a_mutation_changes_is_in_its_file_once_and_its_tests_are_there(mutation):
    assert (ROOT / mutation["path"]).read_text("utf-8").count(mutation["old"]) == 1
    assert mutation["new"] != mutation["old"]
    assert all((ROOT / path).exists() for path in mutation["tests"])


@pytest.mark.skipif(sys.platform != "linux", reason="attacks are forks of a process that has everything imported")
def test_what_is_private_stays_at_home_when_drawn_folders_are_pushed():
    command = [sys.executable, str(ATTACK / "run.py"), "--quick", "--only", "pushes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().splitlines()[-1] == "attacks 40, problems 0"
