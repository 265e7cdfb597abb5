"""Values that follow from others: derived anew when those change, and never in place of what a user assigned."""

import pickle
from copy import copy
from dataclasses import replace

import pytest

from tr_args import ArgumentsError, TrainingArguments


@pytest.mark.parametrize(
    ("given", "assigned"),
    [
        ({"torch_compile": True}, {"torch_compile": False}),
        ({"torch_compile_backend": "eager"}, {"torch_compile": False}),
        ({"torch_compile_mode": "default"}, {"torch_compile": False}),
        ({"eval_strategy": "steps"}, {"do_eval": False}),
        ({}, {"do_eval": False, "eval_strategy": "epoch"}),
        ({"use_cpu": True}, {"dataloader_pin_memory": True}),
        ({"log_level": "error"}, {"disable_tqdm": False}),
        ({"log_level": "error"}, {"disable_tqdm": True, "log_level": "info"}),
        ({"eval_strategy": "steps"}, {"eval_steps": 500, "logging_steps": 3}),  # 500 is what followed before
        ({"load_best_model_at_end": True, "eval_strategy": "steps"}, {"metric_for_best_model": "loss"}),
        ({"load_best_model_at_end": True, "eval_strategy": "steps"}, {"greater_is_better": True}),
    ],
)
def test_what_was_assigned_stays(given, assigned):
    args = TrainingArguments("out", **given)
    for name, value in assigned.items():
        setattr(args, name, value)
    for _ in range(2):
        args.check()
        assert {name: getattr(args, name) for name in assigned} == assigned
        assert all(args.origin(name) == "assignment" for name in assigned)


@pytest.mark.parametrize(
    ("given", "assigned", "followed"),
    [
        ({}, {"log_level": "error"}, {"disable_tqdm": True}),
        ({"log_level": "critical"}, {"log_level": "info"}, {"disable_tqdm": False}),
        ({"eval_strategy": "steps"}, {"logging_steps": 7}, {"eval_steps": 7}),
        ({"eval_strategy": "steps"}, {"eval_strategy": "no"}, {"do_eval": False}),
        ({}, {"eval_strategy": "epoch"}, {"do_eval": True}),
        ({"use_cpu": True}, {"use_cpu": False}, {"dataloader_pin_memory": True}),
        ({"torch_compile": True}, {"torch_compile": False}, {"torch_compile_backend": None}),
        ({"torch_compile_mode": "default"}, {"torch_compile_mode": None}, {"torch_compile": False}),
        (
            {"save_strategy": "best", "eval_strategy": "steps"},
            {"metric_for_best_model": "accuracy"},
            {"greater_is_better": True},
        ),
        (
            {"save_strategy": "best", "eval_strategy": "steps"},
            {"save_strategy": "no"},
            {"metric_for_best_model": None, "greater_is_better": None},
        ),
        ({"eval_strategy": "steps"}, {"eval_steps": None}, {"eval_steps": 500}),  # unset again
    ],
)
def test_what_follows_from_others_follows_again_when_they_have_changed(given, assigned, followed):
    args = TrainingArguments("out", **given)
    for name, value in assigned.items():
        setattr(args, name, value)
    for _ in range(2):
        args.check()
        assert {name: getattr(args, name) for name in followed} == followed


def test_what_follows_from_others_is_no_assignment():
    args = TrainingArguments("out", eval_strategy="steps", torch_compile=True)
    args.logging_steps = 7
    before = args.num_assignments
    args.check()
    args.check()
    assert args.num_assignments == before
    assert [args.origin(name) for name in ("eval_steps", "do_eval", "disable_tqdm")] == ["default"] * 3


@pytest.mark.parametrize("copied", [copy, lambda args: pickle.loads(pickle.dumps(args))], ids=["copied", "pickled"])
def test_a_copy_follows_for_itself(copied):
    args = TrainingArguments("out", eval_strategy="steps", log_level="error")
    other = copied(args)
    other.disable_tqdm, other.logging_steps, args.log_level = False, 9, "info"
    assert (other.check().disable_tqdm, other.eval_steps) == (False, 9)
    args.log_level = "error"
    assert (args.check().disable_tqdm, args.eval_steps) == (True, 500)


def test_a_constructor_follows_as_the_reference_does():
    args = TrainingArguments("out", do_eval=False, eval_strategy="steps")
    assert args.do_eval is True
    assert replace(TrainingArguments("out"), eval_strategy="steps").do_eval is True


def test_a_contradiction_that_came_by_assignment_is_still_named():
    args = TrainingArguments("out", eval_strategy="steps", load_best_model_at_end=True)
    args.eval_strategy = "no"
    with pytest.raises(ArgumentsError, match="needs evaluations"):
        args.check()
