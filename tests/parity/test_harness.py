"""The comparison itself: each of its checks sees a difference."""

import parity_data as data
import parity_models as models
import pytest
from parity_harness import CHECKS, OURS, REFERENCE, Scenario, assert_same, run

PLAIN = {"weight_decay": 0.1, "eval_strategy": "epoch"}


def outcome(side, folder, **changes):
    evaluation = data.classes(9, seed=8)
    return run(side, Scenario(models.Mlp, data.classes(), evaluation, {**PLAIN, **changes}), folder / side.name)


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("batches", {"seed": 1}),
        ("batches", {"per_device_eval_batch_size": 4}),
        ("events", {"logging_steps": 2}),
        ("events", {"max_steps": 9}),
        ("history", {"learning_rate": 0.0500001}),
        ("history", {"logging_strategy": "epoch"}),
        ("rates", {"max_steps": 10}),
        ("state", {"max_steps": 9}),
        ("state", {"logging_steps": 2}),
        ("weights", {"learning_rate": 0.0500001}),
        ("weights", {"weight_decay": 0.1001}),
        ("optimizer", {"adam_beta2": 0.99}),
        ("optimizer", {"weight_decay": 0.1001}),
    ],
)
def test_a_difference_is_seen(tmp_path, check, change):
    others = [name for name in CHECKS if name != check]
    reference = outcome(REFERENCE, tmp_path)
    assert_same(reference, outcome(OURS, tmp_path), but=others)
    with pytest.raises(AssertionError):
        assert_same(reference, outcome(OURS, tmp_path, **change), but=others)


def test_a_check_that_does_not_exist_cannot_be_left_out(tmp_path):
    with pytest.raises(AssertionError, match="wheights"):
        assert_same(outcome(REFERENCE, tmp_path), outcome(OURS, tmp_path), but=["wheights"])
