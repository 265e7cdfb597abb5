"""Hold the list of behaviours that a Trainer is accepted by to the tests that show them."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LIST = tomllib.loads((ROOT / "tests/acceptance.toml").read_text("utf-8"))
BEHAVIOURS = {int(number): entry for section in LIST.values() for number, entry in section.items()}


@pytest.fixture(scope="module")
def fault_of():
    """What says why a name is that of no test; its folder holds a module named as that of packages."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        return importlib.import_module("named_tests").fault_of
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_every_behaviour_is_listed_once():
    assert sum(len(section) for section in LIST.values()) == len(BEHAVIOURS)
    assert set(BEHAVIOURS) == set(range(1, 67))


@pytest.mark.parametrize("number", sorted(BEHAVIOURS))
def test_every_behaviour_is_shown_by_tests_that_exist(number, fault_of):
    named = BEHAVIOURS[number]["tests"]
    assert named
    assert [fault for test in named if (fault := fault_of(test))] == []
