"""Every broken set of arguments in `bad_input` is refused with exactly the message beside it."""

import json
from pathlib import Path

import pytest

from tr_args import ArgumentParser, ArgumentsError, TrainingArguments

FOLDER = Path(__file__).parent / "bad_input"
CASES = json.loads((FOLDER / "cases.json").read_text("utf-8"))


def provoke(case):
    if "call" in case:
        return TrainingArguments(**case["call"])
    words = case.get("words", ["--config", case.get("file")])
    parser = ArgumentParser(TrainingArguments, env_prefix="RUN_")
    return parser.parse_args_into_dataclasses(words, args_filename=case.get("args_file"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"].replace(" ", "_"))
def test_bad_input_is_refused_with_its_message(case, monkeypatch):
    monkeypatch.chdir(FOLDER)
    for variable, value in case.get("environment", {}).items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(ArgumentsError) as caught:
        provoke(case)
    expected = case["message"] if isinstance(case["message"], str) else "\n".join(case["message"])
    # What a library says about a syntax error differs between its versions.
    actual = str(caught.value)
    assert (actual[: len(expected) - 3] + "..." if expected.endswith("...") else actual) == expected


def test_every_file_of_the_corpus_is_used():
    text = (FOLDER / "cases.json").read_text("utf-8")
    assert [path.name for path in FOLDER.iterdir() if path.name not in text and path.name != "cases.json"] == []
    assert len(CASES) >= 30


def test_problems_can_be_read_by_a_program():
    with pytest.raises(ArgumentsError) as caught:
        TrainingArguments(seed=-1, lerning_rate=1)
    first, second = caught.value.problems
    assert (first.field, first.value, first.origin) == ("seed", -1, "call")
    assert (second.field, second.message) == (
        "lerning_rate",
        "unknown argument lerning_rate; did you mean learning_rate?",
    )


def test_problems_of_a_file_and_of_the_values_in_another_are_reported_together(tmp_path):
    good = tmp_path / "good.json"
    good.write_text('{"seed": "x"}')
    words = ["--config", str(tmp_path / "none.yaml"), "--config", str(good), "--bf16", "--fp16"]
    with pytest.raises(ArgumentsError) as caught:
        ArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert len(caught.value.problems) == 3
