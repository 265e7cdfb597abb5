"""Early stopping: what it compares with, what it skips, and what a resumed run remembers."""

import math
import warnings

import pytest
import torch
from support.callbacks import Stop, StopAt
from support.checkpointer import MemoryCheckpointer
from support.data import samples

from tr_core import EarlyStoppingCallback


@pytest.fixture
def stopping(make_trainer):
    """Build a Trainer of ten steps whose evaluations give the values one after the other."""

    def build(values, patience=1, threshold=0.0, callbacks=(), **changes):
        given = iter(values)
        options = {
            "eval_strategy": "steps",
            "eval_steps": 1,
            "eval_dataset": samples(4),
            "metric_for_best_model": "score",
            "greater_is_better": True,
            "compute_metrics": lambda p: {"score": next(given)},
        }
        stopper = EarlyStoppingCallback(patience, threshold)
        return make_trainer(40, callbacks=[stopper, *callbacks], **{**options, **changes}), stopper

    return build


@pytest.mark.parametrize(
    ("values", "patience", "threshold", "greater", "stopped_at"),
    [
        ([1, 2, 3, 2, 9], 1, 0.0, True, 4),
        ([1, 2, 2, 9, 9], 1, 0.0, True, 3),  # equal is not an improvement
        ([1, 0, 0, 2, 1, 1, 1], 3, 0.0, True, 7),  # an improvement starts the count over
        ([3, 2, 1, 2], 1, 0.0, False, 4),
        ([1.0, 1.05, 1.2, 1.25, 9], 1, 0.1, True, 2),
        ([1.0, 1.2, 1.4, 1.45, 9], 1, 0.1, True, 4),
        ([5, 4, 3, 2, 1, 1, 1, 1, 1, 1], 20, 0.0, True, 10),
    ],
)
def test_a_run_stops_after_so_many_evaluations_without_improvement(
    stopping, values, patience, threshold, greater, stopped_at
):
    trainer, _ = stopping(values, patience, threshold, greater_is_better=greater)
    assert trainer.train().global_step == stopped_at


def test_small_steps_within_the_threshold_are_the_best_but_no_improvement(stopping):
    """The best that is compared with moves by each of them."""
    trainer, stopper = stopping([1.0, 1.05, 1.1, 1.15, 9], patience=3, threshold=0.1)
    assert trainer.train().global_step == 4
    assert (trainer.state.best_metric, stopper.early_stopping_patience_counter) == (1.15, 3)


def test_a_metric_that_is_no_number_is_no_improvement(stopping):
    trainer, _ = stopping([math.nan] * 10, patience=3)
    assert trainer.train().global_step == 3
    trainer, _ = stopping([1.0, math.nan, 2.0, math.nan, math.nan, 9], patience=2)
    assert trainer.train().global_step == 5


def test_of_several_data_sets_the_one_with_the_metric_counts_and_nothing_warns(stopping, heard):
    lines = heard()
    values = iter([5.0, 1.0, 4.0, 2.0, 3.0, 1.5, 2.0, 9.0])  # of a and b in turn: b gets worse at the third
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer, _ = stopping(
            [],
            eval_dataset={"a": samples(4), "b": samples(4, seed=1)},
            metric_for_best_model="b_score",
            compute_metrics=lambda p: {"score": next(values)},
        )
        assert trainer.train().global_step == 3
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (2.0, 2)
    assert not [line for line in lines if "stopping" in line]


def test_a_resumed_run_continues_its_count(stopping):
    memory = MemoryCheckpointer()
    saving = {"checkpointer": memory, "save_strategy": "steps", "save_steps": 1}
    first, _ = stopping([5, 4, 3, 2, 1], patience=4, callbacks=[StopAt(3)], **saving)
    with pytest.raises(Stop):
        first.train()
    second, stopper = stopping([3, 2, 1, 0], patience=4, **saving)
    assert second.train(resume_from_checkpoint=True).global_step == 5
    assert stopper.early_stopping_patience_counter == 4
    assert second.state.best_metric == 5


def test_every_run_of_one_trainer_counts_from_zero(stopping):
    trainer, _ = stopping([3, 2, 1, math.nan, 5, 4, 3, 2], patience=2)
    assert trainer.train().global_step == 3
    assert trainer.train().global_step == 4


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="early_stopping_patience=0 must be at least 1"):
        EarlyStoppingCallback(0)
    for threshold in (-0.1, math.nan):
        with pytest.raises(ValueError, match=f"early_stopping_threshold={threshold} must be at least 0"):
            EarlyStoppingCallback(1, threshold)


def test_a_run_that_was_ended_is_not_continued_by_a_resume(stopping, tmp_path):
    options = {"checkpointer": MemoryCheckpointer(tmp_path), "save_strategy": "steps", "save_steps": 1}
    trainer, _ = stopping([1, 2, 1, 9], **options)
    assert trainer.train().global_step == 3
    weights = [p.detach().clone() for p in trainer.model.parameters()]
    again, stopper = stopping([], **options)
    assert again.train(resume_from_checkpoint=True).global_step == 3
    assert all(map(torch.equal, again.model.parameters(), weights))
    assert stopper.early_stopping_patience_counter == 1


def test_a_run_that_was_ended_is_continued_with_a_larger_patience(stopping, tmp_path):
    options = {"checkpointer": MemoryCheckpointer(tmp_path), "save_strategy": "steps", "save_steps": 1}
    trainer, _ = stopping([1, 2, 1], **options)
    assert trainer.train().global_step == 3
    again, _ = stopping([2, 1], patience=2, **options)
    assert again.train(resume_from_checkpoint=True).global_step == 4


def test_a_subclass_may_judge_the_metric_otherwise(make_trainer):
    class Never(EarlyStoppingCallback):
        def check_metric_value(self, args, state, control, metric_value):
            self.early_stopping_patience_counter = 0

    trainer = make_trainer(
        8,
        callbacks=[Never(1)],
        eval_dataset=samples(4),
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="loss",
        learning_rate=0.0,
        max_steps=4,
    )
    trainer.train()
    assert trainer.state.global_step == 4


def test_its_state_is_exported_as_arguments_and_counter():
    callback = EarlyStoppingCallback(4, 0.5)
    callback.early_stopping_patience_counter = 2
    assert callback.state() == {
        "args": {"early_stopping_patience": 4, "early_stopping_threshold": 0.5},
        "attributes": {"early_stopping_patience_counter": 2},
    }
