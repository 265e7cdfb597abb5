"""The greedy schedule: up after a row of improvements, down after a row of failures, within bounds."""

import pytest
import torch
from support.data import samples
from support.runs import log_of
from torch import nn

from tr_core import get_scheduler
from tr_core.optim.greedy import GreedyLR


def optimizer(*rates):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0)


def rates(results, *, lr=1.0, **options):
    """The rate after each result."""
    options = {"patience": 0, "factor": 0.5, **options}
    schedule = GreedyLR(optimizer(lr), **options)
    found = []
    for result in results:
        schedule.step(result)
        found.append(schedule.optimizer.param_groups[0]["lr"])
    return found


def test_rates_start_over_only_once_all_of_them_are_at_their_least():
    schedule = GreedyLR(optimizer(1.0, 8.0), patience=0, factor=0.5, min_lr=0.5, reset_start=1)
    found = []
    for _ in range(5):
        schedule.step(1.0)
        found.append([group["lr"] for group in schedule.optimizer.param_groups])
    # The first result is an improvement; the first group is at its least two failures later, the second in the end.
    assert found == [[2.0, 16.0], [1.0, 8.0], [0.5, 4.0], [0.5, 2.0], [0.5, 1.0]]
    schedule.step(1.0)
    assert [group["lr"] for group in schedule.optimizer.param_groups] == [1.0, 8.0]


def test_a_result_that_is_no_number_is_a_failure():
    assert rates([1, float("nan"), float("nan")]) == [2, 1, 0.5]


def test_the_rate_stays_within_a_hundredth_and_ten_times_its_first_value():
    assert max(rates(range(100, 0, -1), lr=5e-5)) == pytest.approx(5e-4)
    assert min(rates([1] * 100, lr=5e-5)) == pytest.approx(5e-7)


def test_bounds_that_are_given_are_kept():
    assert min(rates([1] * 9, min_lr=0.2)) == 0.2
    assert max(rates(range(9, 0, -1), max_lr=3.0)) == 3.0
    schedule = GreedyLR(optimizer(1.0, 2.0), patience=0, factor=0.5, min_lr=[0.75, 0.5])
    for _ in range(9):
        schedule.step(1.0)
    assert schedule.get_last_lr() == [0.75, 0.5]


def test_changes_that_are_too_small_are_not_made():
    assert rates([1, 1, 1], eps=0.6) == [2, 1, 1]


def test_a_saved_schedule_continues_as_if_it_had_not_stopped():
    results = [5, 4, 3, 3, 3, 2, 1, 1, 1, 1, 0.5]
    options = {"patience": 1, "factor": 0.5, "cooldown": 1, "warmup": 1, "smooth": True, "window_size": 2}
    for stop in range(len(results)):
        whole, first, second = (GreedyLR(optimizer(1.0), **options) for _ in range(3))
        for result in results:
            whole.step(result)
        for result in results[:stop]:
            first.step(result)
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.load_state_dict(first.state_dict())
        for result in results[stop:]:
            second.step(result)
        assert second.get_last_lr() == whole.get_last_lr()


def test_a_rate_that_is_a_tensor_stays_one():
    group = {"params": [nn.Parameter(torch.zeros(1))], "lr": torch.tensor(1.0)}
    schedule = GreedyLR(torch.optim.Adam([group], capturable=True), patience=0, factor=0.5)
    schedule.step(1.0)
    assert isinstance(group["lr"], torch.Tensor)
    assert group["lr"].item() == 2.0


@pytest.mark.parametrize(("greater", "better"), [(False, "down"), (True, "up")])
def test_it_follows_the_direction_of_the_watched_metric_and_is_stepped_at_evaluations(make_trained, greater, better):
    for name, results in (("up", [1.0, 2.0, 3.0]), ("down", [3.0, 2.0, 1.0])):
        given = iter(results)
        trainer = make_trained(
            lr_scheduler_type="greedy",
            lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
            learning_rate=1e-4,
            eval_strategy="epoch",
            num_train_epochs=3,
            eval_dataset=samples(8, 1),
            metric_for_best_model="score",
            greater_is_better=greater,
            compute_metrics=lambda prediction, given=given: {"score": next(given)},
        )
        logged = log_of(trainer, "learning_rate")
        last = trainer.lr_scheduler.get_last_lr()[0]
        assert logged[:5] == [1e-4] * 5
        assert len(set(logged[5:10])) == 1
        # The first result is an improvement in any case.
        assert last == pytest.approx(8e-4 if name == better else 0.5e-4)


def test_the_default_learning_rate_can_be_lowered(make_trained):
    """The least rate of the reference, 1e-3, lies above it."""
    trainer = make_trained(
        lr_scheduler_type="greedy",
        lr_scheduler_kwargs={"patience": 0},
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=samples(8, 1),
        compute_metrics=lambda prediction: {"score": 1.0},
        metric_for_best_model="score",
    )
    assert trainer.lr_scheduler.get_last_lr()[0] == pytest.approx(5e-5 / 0.95 * 0.95**4)


MESSAGES = [
    ({"min_lr": 1e-3}, "min_lr=0.001 is above the learning rate 5e-05 of a parameter group, .* never be lowered"),
    ({"max_lr": 1e-6}, "max_lr=1e-06 is below the learning rate 5e-05 of a parameter group, .* never be raised"),
    ({"min_lr": [0, 0]}, r"min_lr=\[0, 0\] has 2 numbers for 1 parameter groups; give 1 or 1"),
    ({"factor": 1.5}, "factor=1.5 must lie between 0 and 1"),
    ({"mode": "low"}, "mode='low' is not known; choose min"),
    ({"threshold_mode": "x"}, "threshold_mode='x' is not known; choose rel or abs"),
    ({"window_size": 0}, "window_size=0 must be at least 1"),
    ({"patienc": 3}, r"lr_scheduler_kwargs has \['patienc'\], which the schedule 'greedy' does not take; it takes"),
]


@pytest.mark.parametrize(("options", "message"), MESSAGES)
def test_options_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        get_scheduler("greedy", optimizer(5e-5), scheduler_specific_kwargs=options)


@pytest.mark.parametrize("name", ["greedy", "reduce_lr_on_plateau"])
def test_a_schedule_that_follows_evaluations_has_no_warm_up(name):
    with pytest.raises(ValueError, match=f"the schedule '{name}' follows evaluations and has no warm-up, .* 10 steps"):
        get_scheduler(name, optimizer(1.0), num_warmup_steps=10)
