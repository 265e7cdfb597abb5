"""What `tools/nightly.py` reads from nox, and the page it writes; what `tools/minimums.py` reads from the packages."""

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"


def tool(name, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    specification = importlib.util.spec_from_file_location(f"{name}_of_the_tools", TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, specification.name, module)  # its dataclasses look for their module
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def nightly(monkeypatch):
    return tool("nightly", monkeypatch)


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
nox > pytest tests/fuzz
1 failed, 3 passed, 1 deselected in 7.15s
nox > python tests/fuzz/run.py
runs 500, discrepancies 0, 61 s
nox > Command python tests/fuzz/run.py failed with exit code 1
nox > Session fuzz failed.
nox > Session pythons-3.13 skipped: Python interpreter 3.13 not found.
nox > Running session crash
nox > pytest tests/crash
"""


def test_each_session_that_nox_ran_is_found_with_the_result_of_each_of_its_commands(nightly):
    assert nightly.findings_in(LOG.splitlines()) == {
        "tests": ("passed", ()),
        "alone(package='tr-log')": ("passed", ("440 passed, 2 skipped",)),
        "fuzz": ("failed", ("1 failed, 3 passed, 1 deselected", "runs 500, discrepancies 0, 61 s")),
        "pythons-3.13": ("not run", ("Python interpreter 3.13 not found.",)),
        "crash": ("failed", ("it did not end",)),
    }


def finding(nightly, session, outcome="passed", results=("3 passed",), seconds=61.4):
    return nightly.Finding(session, outcome, results, seconds, "2026-01-02", "2 cores", "Python 3.11.7")


def test_the_page_has_a_row_a_session_and_keeps_those_of_other_runs(nightly, tmp_path):
    nightly.note([finding(nightly, "parity"), finding(nightly, "fuzz")], tmp_path)
    nightly.note([finding(nightly, "fuzz", outcome="failed", results=("1 failed", "runs 5"), seconds=3661)], tmp_path)
    rows = (tmp_path / "tested.md").read_text().splitlines()[-2:]
    assert rows == [
        "| `fuzz` | **failed** | 1 failed; runs 5 | 1:01:01 | 2026-01-02 | Python 3.11.7 | 2 cores |",
        "| `parity` | passed | 3 passed | 1:01 | 2026-01-02 | Python 3.11.7 | 2 cores |",
    ]
    assert set(json.loads((tmp_path / "tested.json").read_text())) == {"fuzz", "parity"}


def test_a_session_that_fails_keeps_none_from_running_and_its_name_is_said(nightly, monkeypatch, capsys):
    asked, written = [], []

    def run(session, limit_s):
        asked.append(session)
        return [finding(nightly, session, outcome="failed" if session == "crash" else "passed")]

    monkeypatch.setattr(nightly, "run", run)
    monkeypatch.setattr(nightly, "note", written.extend)
    assert nightly.main(["crash", "fuzz"]) == 1
    assert asked == ["crash", "fuzz"] == [each.session for each in written]
    assert capsys.readouterr().out.splitlines()[-1] == "sessions 2, failed 1: crash"


def test_every_session_that_tests_is_run_by_every_change_or_by_a_night(nightly):
    text = (TOOLS.parent / "noxfile.py").read_text()
    there = set(re.findall(r"^@nox\.session.*\n(?:@.*\n)*def (\w+)", text, re.MULTILINE))
    nights = {re.match(r"\w+", session.removeprefix(nightly.SLOW))[0] for session in nightly.SESSIONS}
    every_change = {"tests", "lint", "types", "layers", "alone", "integration"}
    measures_or_writes = {"quickstart", "nightly", "equality", "mutants", "bench", "format_"}
    assert there == nights | every_change | measures_or_writes


def test_a_session_that_nox_never_begins_is_noted_as_failed_with_the_exit_code(nightly, monkeypatch, tmp_path):
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(nightly.sys, "executable", "false")
    (found,) = nightly.run("nosuch")
    assert (found.session, found.outcome, found.results) == ("nosuch", "failed", ("exit code 1; see logs/nosuch.log",))


def test_a_session_that_does_not_end_is_ended_and_noted_as_failed(nightly, monkeypatch, tmp_path):
    endless = tmp_path / "endless"
    endless.write_text("#!/bin/sh\nsleep 600\n")
    endless.chmod(0o755)
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(nightly.sys, "executable", str(endless))
    (found,) = nightly.run("nosuch", limit_s=0.2)
    assert found.results == ("exit code 124; see logs/nosuch.log",)


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
