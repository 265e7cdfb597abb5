"""The table of what ran on which backend: each cell says what happened, and columns of other days stay."""

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "backends"
DOCS = Path(__file__).parents[1] / "packages/tr-all/docs"
sys.path.insert(0, str(FOLDER))

import matrix  # noqa: E402

from tr_core.testing import optimizer_names  # noqa: E402

TESTS = """
import pytest

@pytest.mark.row("resume")
def test_first(): pass

@pytest.mark.row("resume")
def test_second(): assert False

@pytest.mark.row("bf16")
def test_third(): pytest.skip("needs a GPU")

@pytest.mark.row("short")
def test_fourth(): pytest.skip("impossible: it is one process")

@pytest.mark.row("optim sgd")
@pytest.mark.parametrize("variant", ["zero_1", "zero_2"])
def test_fifth(variant, record_property):
    if variant == "zero_2":
        record_property("refused", "it needs matrices")

@pytest.mark.row("optim lomo")
@pytest.mark.parametrize("variant", ["zero_1", "zero_2"])
def test_sixth(variant, record_property):
    record_property("refused", "it needs matrices")

def test_that_a_part_of_its_own_works(): pass
"""


def run(folder, *options):
    environment = {"PYTHONPATH": f"{FOLDER}:{':'.join(sys.path)}", "PATH": "/usr/bin:/bin", "USE_TORCH_XLA": "0"}
    plain = ("-q", "-p", "no:cacheprovider", "-p", "matrix", "--matrix", str(folder / "matrix.md"))
    command = [sys.executable, "-m", "pytest", *plain, *options]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def cells(folder):
    """Return the cells of the page, by row and column."""
    found, head = {}, []
    for line in (folder / "matrix.md").read_text().splitlines():
        words = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not words or words[0] == "---":
            continue
        if words[0] in ("scenario", "`optim`", "backend", "test"):
            head = words
        found |= {(words[0], column): word for column, word in zip(head[1:], words[1:], strict=True)}
    return found


@pytest.mark.slow  # it is a session
def test_a_session_writes_its_column_and_leaves_those_of_other_days(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    about = {"day": "2020-02-02", "machine": "another", "Python": "3.1", "libraries": "torch 1"}
    old = matrix.Column(
        about, {matrix.SCENARIOS["resume"]: "passed, refused (1)", "its own": "passed"}, ["on a | Monday"]
    )
    (tmp_path / "matrix.md").write_text(matrix.page({"ddp": old}))
    ended = run(tmp_path, "--column", "deepspeed")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "not run: needs a GPU: 1\n    test_third" in ended.stdout
    found = cells(tmp_path)
    words = matrix.SCENARIOS
    assert found[words["resume"], "ddp"] == "passed, refused (1)"
    assert found["ddp", "day"] == "2020-02-02"
    assert found[words["resume"], "deepspeed"] == "**failed** (test_second), passed"
    assert found[words["bf16"], "deepspeed"] == "not run (1)"
    assert found[words["short"], "deepspeed"] == "impossible (2)"
    assert found[words["once"], "deepspeed"] == "no test"
    assert found["`lomo`", "deepspeed"] == "refused (4)"
    assert found["`sgd`", "deepspeed"] == "passed, refused (3)"
    assert found["`sgd`", "ddp"] == "no test"
    assert found["that a part of its own works", "result"] == "passed"
    counts = ("passed", "failed", "refused", "not run", "impossible", "no test")
    assert [found["deepspeed", kind] for kind in counts[:5]] == ["1", "1", "1", "1", "1"]
    page = (tmp_path / "matrix.md").read_text()
    assert "3. with zero_2: it needs matrices\n4. it needs matrices\n" in page
    kept = matrix.read(page)["ddp"]
    assert (kept.about, kept.reasons) == (about, old.reasons)
    assert {row: text for row, text in kept.cells.items() if text != "no test"} == old.cells


def test_rows_are_added_to_a_column_on_request(tmp_path):
    path, skipped = tmp_path / "matrix.md", {"not run": {"needs a GPU": {"": 1}}}
    matrix.update(path, "cuda", {"resume": skipped})
    matrix.update(path, "cuda", {"bf16": {"not run": {"needs two": {"": 1}}}}, adds=True)
    found = cells(tmp_path)
    assert [found[matrix.SCENARIOS[row], "cuda"] for row in ("resume", "bf16")] == [
        "not run (1)",
        "not run (2)",
    ]
    matrix.update(path, "cuda", {})
    assert cells(tmp_path)[matrix.SCENARIOS["resume"], "cuda"] == "no test"
    assert "needs a GPU" not in path.read_text()


def test_a_row_that_nobody_knows_is_an_error(tmp_path):
    (tmp_path / "test_it.py").write_text("import pytest\n@pytest.mark.row('resumes')\ndef test_it(): pass\n")
    ended = run(tmp_path, "--column", "cpu")
    assert ended.returncode == 4
    assert "row('resumes') is none of" in ended.stderr
    assert not (tmp_path / "matrix.md").exists()


def test_a_cell_for_which_there_can_be_no_test_says_why():
    page = matrix.page({"xla": matrix.Column(dict.fromkeys(matrix.ABOUT, ""))})
    assert "1. PJRT's CPU carries nothing between processes" in page
    assert matrix.page(matrix.read(page)) == page


def test_the_page_in_the_documentation_can_be_read_back_and_names_every_optimizer():
    page = (DOCS / "matrix.md").read_text()
    columns = matrix.read(page)
    assert matrix.page(columns) == page
    assert {*columns} <= {*matrix.COLUMNS}
    assert all(f"| `{name}` |" in page for name in optimizer_names())
