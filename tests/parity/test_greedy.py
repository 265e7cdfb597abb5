"""The greedy schedule, beside the reference's."""

import random

import pytest
import torch
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
