"""`trainer check` on files that are wrong in one way each: it finds that, says so, and finds nothing else."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from broken_configs_runner import assert_found, copy_corpus, name_of, read_cases, run_check

CORPUS = Path(__file__).parent / "broken_configs"
BROKEN, GOOD = read_cases(CORPUS, "case"), read_cases(CORPUS, "good")


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(copy_corpus(CORPUS, tmp_path))
    return tmp_path


@pytest.mark.filterwarnings("ignore:Got pickle error")  # torch's, beside the error
@pytest.mark.parametrize("case", BROKEN, ids=name_of)
def test_a_broken_configuration_gives_its_code_and_message_and_no_other(case, corpus, capsys, monkeypatch):
    for name, value in case.get("environment", {}).items():
        monkeypatch.setenv(name, value)
    before = sorted(corpus.iterdir())
    code, report = run_check(case, capsys)
    assert_found(case, code, report)
    assert [path for path in sorted(corpus.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize("case", GOOD, ids=name_of)
def test_a_good_configuration_has_no_problems(case, corpus, capsys):
    code, report = run_check(case, capsys)
    assert [problem for problem in report["problems"] if problem["severity"] != "info"] == []
    assert code == 0
    assert not (corpus / "out").exists()


def test_the_corpus_holds_sixty_broken_and_five_good_configurations():
    assert len(BROKEN) >= 60
    assert len(GOOD) >= 5
    listed = {case["file"] for case in [*BROKEN, *GOOD]} | {"cases.toml", "parts.py"}
    assert {path.name for path in CORPUS.iterdir() if path.is_file()} == listed
