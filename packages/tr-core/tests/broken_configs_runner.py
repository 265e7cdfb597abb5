"""Run `trainer check` on a file of a corpus, in this process, and compare what it finds with what the corpus says."""

import json
import shutil
import tomllib

from tr_core.preflight.cli import main


def read_cases(folder, kind):
    return tomllib.loads((folder / "cases.toml").read_text("utf-8"))[kind]


def name_of(case):
    return "-".join([case["file"], *case.get("arguments", [])[:1]])


def copy_corpus(folder, target):
    """A run that went wrong would write into the folder: not into the repository's."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    return target


def run_check(case, capsys):
    code = main(["--json", case["file"], *case.get("arguments", [])])
    return code, json.loads(capsys.readouterr().out)


def assert_found(case, code, report):
    found = [problem for problem in report["problems"] if problem["severity"] != "info"]
    expected = {wanted for wanted, _ in case["expect"]}
    assert {problem["code"] for problem in found} == expected, report["problems"]
    for wanted, fragment in case["expect"]:
        messages = [problem["message"] for problem in found if problem["code"] == wanted]
        assert any(fragment in message for message in messages), messages
    if "origin" in case:
        origins = [problem["origin"] for problem in found if problem["code"] == case["expect"][0][0]]
        assert any(origin.endswith(case["origin"]) for origin in origins), origins
    assert code == int(any(problem["severity"] == "error" for problem in found))
