"""Durations are text that knows how many seconds it is, and come back as they were given."""

import copy
import json
import pickle

import pytest

from tr_args import ArgumentParser, ArgumentsError, Duration, IntervalStrategy, TrainingArguments


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30),
        ("10min", 600),
        ("45m", 2700),
        ("1.5h", 5400),
        ("2h30min", 9000),
        ("2h 30 min 15 s", 9015),
        ("1d12h", 129_600),
        ("3 Hours", 10_800),
        ("90 seconds", 90),
        ("0.5s", 0.5),
    ],
)
def test_a_duration_knows_its_seconds(text, seconds):
    assert Duration(text).seconds == seconds


@pytest.mark.parametrize(
    "text", ["", "10", "min", "-5min", "30min2h", "10ms", "5 parsecs", "1h1h", "1e3s", "0s", "1,5h", "٣h"]
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match="needs a duration such as 90s, 10min, 1.5h or 2h30min"):
        Duration(text)


def test_a_duration_compares_and_is_written_as_the_text_it_was_given_as():
    args = TrainingArguments(eval_strategy="10min", save_strategy="1.5h", logging_strategy=" 30s ", max_time="8h")
    assert (args.eval_strategy, args.save_strategy, args.logging_strategy) == ("10min", "1.5h", "30s")
    assert f"{args.max_time}" == "8h"
    written = args.to_dict()
    assert (written["eval_strategy"], type(written["eval_strategy"])) == ("10min", str)
    assert args.to_sanitized_dict()["save_strategy"] == "1.5h"
    for again in (
        TrainingArguments.from_dict(json.loads(args.to_json_string())),
        pickle.loads(pickle.dumps(args)),
        copy.deepcopy(args),
    ):
        assert again == args
        assert again.max_time.seconds == 28_800


def test_the_words_of_a_strategy_stay_what_they_were():
    args = TrainingArguments(
        eval_strategy="epoch", logging_strategy="no", save_strategy="best", load_best_model_at_end=1
    )
    assert args.eval_strategy is IntervalStrategy.EPOCH
    assert not isinstance(args.save_strategy, Duration)


def test_durations_come_from_command_lines_and_files(tmp_path):
    parser = ArgumentParser(TrainingArguments)
    words = ["--eval-strategy", "10min", "--evaluation_strategy=10min", "--max_time", "2h30min"]
    (args,) = parser.parse_args_into_dataclasses(words)
    assert (args.eval_strategy.seconds, args.max_time.seconds) == (600, 9000)
    (tmp_path / "run.yaml").write_text("save_strategy: 30min\nmax_time: 1.5h\nlogging_strategy: no\n")
    (args,) = parser.parse_yaml_file(tmp_path / "run.yaml")
    assert (args.save_strategy.seconds, args.max_time.seconds, args.logging_strategy) == (1800, 5400, "no")
    assert parser.parse_args_into_dataclasses(["--max_time", "none"])[0].max_time is None


def test_an_assigned_duration_is_checked_too():
    args = TrainingArguments()
    args.max_time = "90min"
    assert args.max_time.seconds == 5400
    with pytest.raises(ArgumentsError, match=r"max_time = 90 \(assignment\): needs a unit, such as 90s, 90min or 90h"):
        args.max_time = 90
    assert args.set_evaluate("10min").eval_strategy.seconds == 600


def test_an_evaluation_by_time_is_an_evaluation_that_is_planned():
    assert TrainingArguments(eval_strategy="10min").do_eval
    assert TrainingArguments(eval_strategy="10min", lr_scheduler_type="reduce_lr_on_plateau").metric_for_best_model
