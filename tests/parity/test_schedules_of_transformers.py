"""Schedules that transformers brings, passed with their optimizer: the same run."""

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, assert_same, run, same_tensors
from transformers.optimization import Adafactor, AdafactorSchedule, GreedyLR

EVALUATION = data.classes(9, seed=8)


def adafactor(model):
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
    return optimizer, AdafactorSchedule(optimizer)


def greedy(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return optimizer, GreedyLR(optimizer, patience=0, factor=0.5, min_lr=1e-4)


def passing(make):
    """Make a subclass whose optimizer and schedule are `make`'s."""

    def subclass(trainer):
        class Own(trainer):
            def __init__(self, model, **options):
                super().__init__(model=model, optimizers=make(model), **options)

        return Own

    return subclass


@pytest.mark.parametrize("logging_steps", [1, 3])
def test_the_schedule_of_adafactor_logs_the_same_rates(parity, logging_steps):
    _, ours = parity(models.Mlp, data.classes(), subclass=passing(adafactor), logging_steps=logging_steps)
    rates = [entry["learning_rate"] for entry in ours.history if "loss" in entry]
    assert all(isinstance(rate, float) for rate in rates)
    assert len(set(rates)) == len(rates)


def greedy_scenario(**more):
    arguments = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss", **more}
    return Scenario(models.Mlp, data.classes(), EVALUATION, arguments, subclass=passing(greedy))


def test_the_greedy_schedule_is_stepped_with_each_evaluation(tmp_path):
    outcomes = [run(side, greedy_scenario(), tmp_path / side.name) for side in (REFERENCE, OURS)]
    assert_same(*outcomes)
    assert len({entry["learning_rate"] for entry in outcomes[1].history if "loss" in entry}) > 3


def test_a_run_with_the_greedy_schedule_resumes(tmp_path):
    whole = run(OURS, greedy_scenario(save_strategy="steps", save_steps=3), tmp_path / "whole")
    checkpoint = str(tmp_path / "whole" / "checkpoint-3")
    again = run(OURS, greedy_scenario(), tmp_path / "again", resume_from_checkpoint=checkpoint)
    assert same_tensors(whole.weights, again.weights)
    assert again.losses == whole.losses


def test_without_a_metric_the_greedy_schedule_says_what_is_needed(tmp_path):
    with pytest.raises(ValueError, match="metric_for_best_model is None; name the metric"):
        run(OURS, greedy_scenario(metric_for_best_model=None), tmp_path)
