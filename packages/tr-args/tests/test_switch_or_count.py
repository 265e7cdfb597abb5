"""Options that are off, on, or a number; and those that are a number or a share."""

import pytest

from tr_args import ArgumentParser, TrainingArguments


@pytest.mark.parametrize(
    ("given", "expected"),
    [(True, True), (False, False), (3, 3), (0, False), ("3", 3), ("true", True), ("off", False), (2.0, 2)],
)
def test_a_trial_is_on_off_or_a_number_of_steps(given, expected):
    value = TrainingArguments(fast_dev_run=given).fast_dev_run
    assert (value, type(value)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], False),
        (["--fast_dev_run"], True),
        (["--fast-dev-run", "5"], 5),
        (["--fast_dev_run", "--bf16"], True),
        (["--no_fast_dev_run"], False),
    ],
)
def test_a_trial_is_a_flag_with_or_without_a_number(words, expected):
    (args,) = ArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert (args.fast_dev_run, type(args.fast_dev_run)) == (expected, type(expected))


@pytest.mark.parametrize(("given", "expected"), [(4, 4), (2.0, 2), ("0.25", 0.25), (1, 1), (None, None)])
def test_batches_to_learn_by_heart_are_a_number_or_a_share(given, expected):
    value = TrainingArguments(overfit_batches=given).overfit_batches
    assert (value, type(value)) == (expected, type(expected))


def test_the_averages_options_go_together():
    args = TrainingArguments(ema_decay="0.999", ema_start_step=100, ema_update_steps=10)
    assert (args.ema_decay, args.ema_start_step, args.ema_update_steps) == (0.999, 100, 10)
