"""Hold the list of behaviours that a Trainer is accepted by to the tests that show them."""

import ast
import functools
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {
    "core": "packages/tr-core/tests",
    "args": "packages/tr-args/tests",
    "ckpt": "packages/tr-ckpt/tests",
    "optim": "packages/tr-optim/tests",
    "tests": "tests",
    "backends": "tests/backends",
    "parity": "tests/parity",
}
LIST = tomllib.loads((ROOT / "tests/acceptance.toml").read_text("utf-8"))
BEHAVIOURS = {int(number): entry for section in LIST.values() for number, entry in section.items()}


@functools.cache
def names_in(path: Path) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.FunctionDef)}


def test_every_behaviour_is_listed_once():
    assert sum(len(section) for section in LIST.values()) == len(BEHAVIOURS)
    assert set(BEHAVIOURS) == set(range(1, 67))


@pytest.mark.parametrize("number", sorted(BEHAVIOURS))
def test_every_behaviour_is_shown_by_tests_that_exist(number):
    named = BEHAVIOURS[number]["tests"]
    assert named
    for test in named:
        place, name = test.split("::")
        folder, file = place.split("/")
        path = ROOT / FOLDERS[folder] / file
        assert path.is_file(), f"{number}: {path} does not exist"
        assert name in names_in(path), f"{number}: {place} has no {name}"
