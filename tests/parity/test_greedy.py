"""The greedy schedule, beside the reference's."""

import random

import parity_data as data
import parity_models as models
import pytest
import torch
from parity_harness import OURS, REFERENCE, Scenario, run, run_both
from transformers.optimization import GreedyLR as ReferenceGreedyLR

from tr_core import get_scheduler

BOUNDS = {"min_lr": 1e-3, "max_lr": 1.0}
CASES = [
    {},
    {"patience": 0},
    {"patience": 2, "factor": 0.7},
    {"patience": 1, "cooldown": 2, "warmup": 3},
    {"patience": 1, "mode": "max"},
    {"patience": 1, "threshold": 0.01, "threshold_mode": "rel"},
    {"patience": 0, "smooth": True, "window_size": 3},
    {"patience": 0, "factor": 0.5, "reset_start": 2},
    {"patience": 0, "factor": 0.5, "min_lr": [0.01, 0.001], "max_lr": [0.2, 0.1]},
]


def rates(kind, options, results):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 0.02)]
    schedule = kind(torch.optim.SGD(groups, lr=1.0), {**BOUNDS, **options})
    found = []
    for result in results:
        schedule.step(result)
        found.append([group["lr"] for group in schedule.optimizer.param_groups])
    return found


def ours(optimizer, options):
    return get_scheduler("greedy", optimizer, scheduler_specific_kwargs=options)


def theirs(optimizer, options):
    return ReferenceGreedyLR(optimizer, **options)


@pytest.mark.parametrize("options", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_it_gives_the_rates_of_the_reference(options, seed):
    generator = random.Random(seed)
    level, results = 20.0, []
    for index in range(300):  # falls, then rises, with noise: rows of both kinds
        level += -0.05 if index % 120 < 60 else 0.03
        results.append(level + generator.gauss(0, 0.02))
    assert rates(ours, options, results) == rates(theirs, options, results)


def test_a_run_is_the_same(parity):
    parity(
        models.Mlp,
        data.classes(),
        data.classes(9, seed=8),
        lr_scheduler_type="greedy",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5, **BOUNDS},
        eval_strategy="steps",
        eval_steps=1,
    )


@pytest.mark.reference_fails
def test_the_default_learning_rate_can_be_lowered(tmp_path):
    """21: the reference's least rate, 1e-3, lies above the default learning rate."""
    scenario = Scenario(
        models.Mlp,
        data.classes(),
        data.classes(9, seed=8),
        {
            "lr_scheduler_type": "greedy",
            "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0},  # nothing is an improvement
            "eval_strategy": "steps",
            "eval_steps": 1,
            "learning_rate": 5e-5,
        },
    )
    reference, ours = run_both(scenario, tmp_path)
    assert reference.trainer.optimizer.param_groups[0]["lr"] == 5e-5 / 0.95  # raised once, by the first result
    assert ours.trainer.optimizer.param_groups[0]["lr"] < 4e-5


@pytest.mark.reference_fails
def test_it_follows_the_direction_of_the_metric(tmp_path):
    """21: the reference takes a metric that grows for one that gets worse."""

    def grows():
        values = iter(range(100))
        return lambda prediction: {"score": float(next(values))}

    last = {}
    for side in (REFERENCE, OURS):
        scenario = Scenario(
            models.Mlp,
            data.classes(),
            data.classes(9, seed=8),
            {
                "lr_scheduler_type": "greedy",
                "lr_scheduler_kwargs": {"patience": 0, **BOUNDS},
                "eval_strategy": "steps",
                "eval_steps": 1,
                "metric_for_best_model": "score",
                "greater_is_better": True,
            },
            {"compute_metrics": grows()},
        )
        last[side.name] = run(side, scenario, tmp_path / side.name).trainer.optimizer.param_groups[0]["lr"]
    assert last["reference"] < 0.05 < last["ours"]
