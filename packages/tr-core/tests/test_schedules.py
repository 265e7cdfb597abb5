"""Schedules: the rates of groups, and what is refused; `tests/parity` compares their values."""

import pytest
import torch
from support.data import samples
from support.runs import log_of
from torch import nn

from tr_args.testing import MetricSchedule
from tr_core import get_scheduler
from tr_core.optim.schedules import FOLLOW_METRIC


def test_each_group_has_its_own_rate_also_one_that_comes_later():
    first, second, third = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = torch.optim.SGD([{"params": [first], "lr": 2.0}, {"params": [second], "lr": 3.0}])
    schedule = get_scheduler("linear", optimizer, 2, 6)
    rates = []
    for step in range(6):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
        if step == 2:
            optimizer.add_param_group({"params": [third], "lr": 8.0})
    assert rates[:3] == [[0, 0], [1, 1.5], [2, 3]]
    assert rates[3:] == [[1.5, 2.25, 8.0], [1, 1.5, 4], [0.5, 0.75, 2]]
    assert schedule.get_last_lr() == [0, 0, 0]


def test_a_function_gets_the_lengths_and_the_rate_of_the_first_group():
    def own(step, *, warmup_steps, total_steps, base_lr, factor):
        return step + 10 * warmup_steps + 100 * total_steps + 1000 * base_lr + factor

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = get_scheduler(own, optimizer, 3, 7, {"factor": 0.5})
    assert schedule.lr_lambdas[0](4) == 4 + 30 + 700 + 2000 + 0.5


# Their arguments


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("polynomial", {"lr_end": 3.0}, "lr_end=3 must be below learning_rate=2"),
        ("cosine_with_min_lr", {}, r"give one of min_lr \(=None\) and min_lr_rate \(=None\)"),
        ("cosine_with_min_lr", {"min_lr": 1.0, "min_lr_rate": 0.5}, "not both or neither"),
        ("warmup_stable_decay", {}, "needs num_decay_steps in lr_scheduler_kwargs"),
        ("warmup_stable_decay", {"num_decay_steps": 1, "decay_type": "exp"}, "decay_type='exp' is not known"),
        ("linear", {"base_lr": 1.0}, r"lr_scheduler_kwargs has \['base_lr'\]"),
    ],
)
def test_a_schedule_says_what_is_wrong_with_its_arguments(name, options, message):
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=2.0)
    with pytest.raises(ValueError, match=message):
        get_scheduler(name, optimizer, num_training_steps=4, scheduler_specific_kwargs=options)


@pytest.mark.parametrize(("greater", "mode"), [(True, "max"), (False, "min")])
def test_the_plateau_schedule_follows_the_direction_of_the_metric(make_trained, greater, mode):
    values = iter([0.5, 0.4, 0.3, 0.2])
    trainer = make_trained(
        16,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=samples(4),
        compute_metrics=lambda p: {"score": next(values)},
        metric_for_best_model="score",
        greater_is_better=greater,
        learning_rate=1.0,
        optim="sgd",
    )
    assert trainer.lr_scheduler.mode == mode
    logged = log_of(trainer, "learning_rate")
    assert logged == ([1.0, 1.0, 0.5, 0.25] if greater else [1.0] * 4)


def test_every_schedule_that_follows_a_metric_has_a_class():
    assert list(FOLLOW_METRIC) == list(MetricSchedule)
