"""Ranges of steps are text that knows its first and its last step."""

import copy
import json
import pickle

import pytest

from tr_args import ArgumentParser, ArgumentsError, TrainingArguments


@pytest.mark.parametrize(
    ("given", "text", "first", "last"),
    [("10:15", "10:15", 10, 15), ("10", "10", 10, 10), (10, "10", 10, 10), (" 2 : 2 ", "2:2", 2, 2)],
)
def test_a_range_knows_its_steps(given, text, first, last):
    steps = TrainingArguments(profile_steps=given).profile_steps
    assert (steps, steps.first, steps.last) == (text, first, last)


@pytest.mark.parametrize(
    ("given", "needed"),
    [
        ("10:5", "needs the first step before the last, as in 5:10"),
        ("0", "needs steps from 1: the first step of a run is 1"),
        ("0:3", "needs steps from 1"),
        *(
            (text, "needs one step such as 10, or the first and the last")
            for text in ("soon", "1:2:3", "5:", ":5", "-3")
        ),
        *((text, "needs one step such as 10, or the first and the last") for text in ("", "1e3", "٣", "9" * 30)),
        *((value, "needs one step such as 10, or the first and the last") for value in (1.5, True, [1, 2])),
    ],
)
def test_what_is_no_range_is_refused(given, needed):
    with pytest.raises(ArgumentsError, match=needed):
        TrainingArguments(profile_steps=given)


def test_a_range_is_written_as_text_and_comes_back_from_command_lines_and_files(tmp_path):
    args = TrainingArguments(profile_steps="10:15")
    assert type(args.to_dict()["profile_steps"]) is str
    again = [TrainingArguments.from_dict(json.loads(args.to_json_string())), pickle.loads(pickle.dumps(args))]
    parser = ArgumentParser(TrainingArguments)
    again += [copy.deepcopy(args), *parser.parse_args_into_dataclasses(["--profile_steps", "10:15"])]
    (tmp_path / "run.yaml").write_text("profile_steps: 10:15\n")
    again += parser.parse_yaml_file(tmp_path / "run.yaml")
    assert [(each.profile_steps.first, each.profile_steps.last) for each in again] == [(10, 15)] * 5
    assert parser.parse_args_into_dataclasses(["--profile_steps", "none"])[0].profile_steps is None
    args.profile_steps = "3"
    assert args.profile_steps.last == 3
