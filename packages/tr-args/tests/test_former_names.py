"""Former names of arguments."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tr_args import ArgumentParser, ArgumentsError, TrainingArguments


@pytest.mark.parametrize(
    ("former", "value", "name", "expected"),
    [
        ("evaluation_strategy", "epoch", "eval_strategy", "epoch"),
        ("warmup_ratio", 0.1, "warmup_steps", 0.1),
        ("no_cuda", True, "use_cpu", True),
        ("group_by_length", True, "train_sampling_strategy", "group_by_length"),
        ("group_by_length", False, "train_sampling_strategy", "random"),
        ("gradient_checkpointing", True, "activation_checkpointing", True),
        (
            "gradient_checkpointing_kwargs",
            {"use_reentrant": False},
            "activation_checkpointing_kwargs",
            {"use_reentrant": False},
        ),
        ("per_gpu_train_batch_size", 2, "per_device_train_batch_size", 2),
        ("per_gpu_eval_batch_size", 2, "per_device_eval_batch_size", 2),
    ],
)
def test_a_former_name_can_be_passed_set_and_read_with_one_notice(caplog, former, value, name, expected):
    with caplog.at_level(logging.INFO, logger="tr_args"):
        passed = TrainingArguments(**{former: value})
        assigned = TrainingArguments()
        setattr(assigned, former, value)
        assert getattr(passed, name) == getattr(assigned, name) == expected
        assert getattr(passed, former) == value
    assert [record.getMessage() for record in caplog.records] == [
        f"{former} is a former name and still works; the argument is called {name}"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_former_name_s_wrong_value_is_reported_once():
    with pytest.raises(ArgumentsError) as caught:
        TrainingArguments(evaluation_strategy="epohc", load_best_model_at_end=True)
    assert [problem.field for problem in caught.value.problems] == ["evaluation_strategy"]


def test_a_former_name_may_repeat_what_the_present_one_says():
    assert TrainingArguments(evaluation_strategy="epoch", eval_strategy="epoch").eval_strategy == "epoch"
    args = TrainingArguments(group_by_length=False, train_sampling_strategy="sequential")
    assert args.train_sampling_strategy == "sequential"
    assert TrainingArguments(warmup_ratio=0, warmup_steps=20).warmup_steps == 20


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"warmup_ratio": 0.03, "warmup_steps": 0}, 0.03),
        ({"warmup_steps": "0.0", "warmup_ratio": "0.03"}, 0.03),
        ({"warmup_ratio": 0.0, "warmup_steps": 0}, 0),
        ({"warmup_ratio": None}, 0),
        ({"warmup_ratio": None, "warmup_steps": 20}, 20),
        ({"warmup_ratio": None, "warmup_steps": 0.1}, 0.1),
    ],
)
def test_a_ratio_of_warmup_stands_beside_no_steps_and_none_says_nothing(given, expected, tmp_path):
    assert TrainingArguments(**given).warmup_steps == expected
    (tmp_path / "x.json").write_text(json.dumps(given))
    [args] = ArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--config", str(tmp_path / "x.json")])
    assert args.warmup_steps == expected
    if None not in given.values():
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        assert ArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)[0].warmup_steps == expected


def test_no_value_for_a_former_name_leaves_the_present_one():
    args = TrainingArguments(
        evaluation_strategy=None, per_gpu_train_batch_size=None, per_device_train_batch_size=4,
        gradient_checkpointing_kwargs=None, activation_checkpointing_kwargs={"use_reentrant": False},
    )  # fmt: skip
    assert (args.eval_strategy, args.per_device_train_batch_size) == ("no", 4)
    assert args.activation_checkpointing_kwargs == {"use_reentrant": False}


def test_a_ratio_of_warmup_with_steps_that_are_wrong_is_one_problem():
    with pytest.raises(ArgumentsError) as caught:
        TrainingArguments(warmup_ratio=0.1, warmup_steps=-1)
    assert [problem.field for problem in caught.value.problems] == ["warmup_steps"]


def test_overwrite_output_dir_and_logging_dir_are_arguments_of_their_own():
    args = TrainingArguments("out", overwrite_output_dir=True, logging_dir="~/logs")
    assert args.overwrite_output_dir
    assert args.logging_dir == str(Path.home() / "logs")


def test_a_notice_does_not_end_a_program_whose_stderr_is_closed(tmp_path):
    program = (
        "import sys; sys.stderr.close(); from tr_args import TrainingArguments as A; "
        "print(A('x', evaluation_strategy='no').eval_strategy)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "no"
