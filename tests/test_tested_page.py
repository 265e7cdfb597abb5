"""What `tools/tested.py` reads from nox, and the page it writes; what `tools/minimums.py` reads from the packages."""

import ast
import importlib.util
import json
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def tool(name, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    specification = importlib.util.spec_from_file_location(f"{name}_of_the_tools", TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, specification.name, module)  # its dataclasses look for their module
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def tested(monkeypatch):
    return tool("tested", monkeypatch)


@pytest.fixture
def minimums(monkeypatch):
    return tool("minimums", monkeypatch)


LOG = """nox > Running session tests
nox > Session tests was successful in 0 seconds.
nox > Running session alone(package='tr-log')
nox > Reusing existing virtual environment at .nox/alone-package-tr-log.
nox > uv pip install pytest
nox > pytest packages/tr-log/tests
........                                  [100%]
SKIPPED [2] packages/tr-log/tests/test_wandb_tracker.py:10: could not import 'wandb'
======= 440 passed, 2 skipped in 77.15s (0:01:17) =======
W1123 17:33:16.102000 11729 torch/utils/_pytree.py:630] a library's last words
nox > Session alone(package='tr-log') was successful in 1 minute.
nox > Running session fuzz
nox > pytest tests/campaigns/fuzz
1 failed, 3 passed, 1 deselected in 7.15s
nox > python tests/campaigns/fuzz/run.py
runs 500, discrepancies 0, 61 s
nox > Command python tests/campaigns/fuzz/run.py failed with exit code 1
nox > Session fuzz failed.
nox > Session pythons-3.13 skipped: Python interpreter 3.13 not found.
nox > Running session integration
nox > pytest tests -m 'not slow' -m slow
9 passed in 100.15s
nox > Session integration was successful in 2 minutes.
nox > Running session crash
nox > pytest tests/campaigns/crash
"""


def test_the_page_has_a_row_a_session(tested, tmp_path, monkeypatch):
    monkeypatch.setattr(tested, "PAGE", tmp_path / "tested.md")
    (tmp_path / "night.log").write_text(LOG)
    tested.main(["--where", "Linux, torch 2.13.0", "--date", "2026-01-02", str(tmp_path / "night.log")])
    text = tested.PAGE.read_text()
    assert "2026-01-02, Linux, torch 2.13.0." in text
    assert text.splitlines()[-6:] == [
        "| `alone(package='tr-log')` | passed | 440 passed, 2 skipped | 1 minute |",
        "| `crash` | **failed** | it did not end | - |",
        "| `fuzz` | **failed** | 1 failed, 3 passed, 1 deselected; runs 500, discrepancies 0, 61 s | - |",
        "| `integration, slow tests` | passed | 9 passed | 2 minutes |",
        "| `pythons-3.13` | not run | Python interpreter 3.13 not found. | - |",
        "| `tests` | passed | - | 0 seconds |",
    ]


def sessions(name, monkeypatch):
    """The sessions that a tuple of the noxfile holds, without importing nox."""
    source = ast.parse((TOOLS.parent / "noxfile.py").read_text())
    (value,) = (n.value for n in source.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name)
    return eval(ast.unparse(value), {"BACKENDS": tool("requirements", monkeypatch).BACKENDS})


def test_every_session_that_tests_is_run_by_every_change_or_by_a_night(monkeypatch):
    text = (TOOLS.parent / "noxfile.py").read_text()
    there = set(re.findall(r"^@nox\.session.*\n(?:@.*\n)*def (\w+)", text, re.MULTILINE))
    nights = {re.match(r"\w+", session)[0] for session in sessions("NIGHT", monkeypatch)}
    every_change = {"tests", "lint", "types", "layers", "alone", "integration"}
    measures_or_writes = {"quickstart", "nightly", "equality", "bench", "format_", "regen"}
    assert there == nights | every_change | measures_or_writes


def test_the_scheduled_workflow_has_a_job_for_each_session_of_a_night(monkeypatch):
    workflow = yaml.safe_load((TOOLS.parent / ".github/workflows/nightly.yml").read_text())
    jobs = workflow["jobs"]["session"]["strategy"]["matrix"]["session"]
    slow = [[name, "--", "-m", "slow"] for name in sessions("SLOW", monkeypatch)]
    assert [shlex.split(job) for job in jobs] == slow + [[name] for name in sessions("NIGHT", monkeypatch)]


def test_what_every_change_runs_by_the_command_has_a_job():
    workflow = yaml.safe_load((TOOLS.parent / ".github/workflows/ci.yml").read_text())
    jobs = {session for job in workflow["jobs"].values() for session in job["strategy"]["matrix"]["session"]}
    assert {"lint", "types", "layers", "integration", "alone"} <= jobs


def test_the_lowest_versions_are_those_that_the_packages_declare(minimums):
    floors = minimums.floors()
    assert {"torch", "numpy", "safetensors", "pyyaml", "rich"} <= set(floors)
    assert not any(name.startswith("tr-") for name in floors)
    assert all(re.fullmatch(r"\d+(\.\d+)*", floor) for floor in floors.values())


def test_the_page_of_versions_has_the_lowest_of_all_that_is_required(minimums):
    page = (TOOLS.parent / "packages/tr-all/docs/versions.md").read_text()
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| (tr-.*) \|$", page, re.MULTILINE)
    declared = {}
    for package in minimums.PACKAGES:
        project = tomllib.loads((package.path / "pyproject.toml").read_text())["project"]
        for name, floor in re.findall(r"(\w+)>=([\d.]+)", " ".join(project["dependencies"])):
            declared.setdefault((name, floor), []).append(package.name)
    assert {(name, floor): sorted(users.split(", ")) for name, floor, users in rows} == {
        key: sorted(users)
        for key, users in declared.items()
        if key[0] not in {"args", "log", "core", "ckpt", "optim", "dist"}
    }


@pytest.mark.parametrize(
    ("requirements", "message"),
    [
        ({"one": ["torch"]}, r"one requires 'torch' without a lowest version: write it as 'name>=version'"),
        ({"one": ["torch>=2.6"], "two": ["torch>=2.7"]}, r"two requires 'torch>=2.7', .* from 2.6: declare one"),
    ],
)
def test_a_library_has_one_lowest_version_in_all_packages(minimums, monkeypatch, tmp_path, requirements, message):
    packages = []
    for name, lines in requirements.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "pyproject.toml").write_text(f"[project]\ndependencies = {json.dumps(lines)}\n")
        packages.append(type("Package", (), {"name": name, "path": tmp_path / name}))
    monkeypatch.setattr(minimums, "PACKAGES", packages)
    with pytest.raises(ValueError, match=message):
        minimums.floors()
