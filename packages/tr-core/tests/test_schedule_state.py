"""How a schedule continues from a checkpoint, with the same arguments or with others."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from tr_core.checkpoint.optimizer_groups import GroupChange
from tr_core.checkpoint.schedule_state import continue_following, continue_function, describe_schedule, load_as_saved


def optimizer(*rates):
    return torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates], lr=1.0)


def falling(*rates):
    return LambdaLR(optimizer(*rates), lambda step: 1 - step / 10)


def plateau(*rates, **options):
    return ReduceLROnPlateau(optimizer(*rates), **{"factor": 0.5, "patience": 0, **options})


def rates(schedule):
    return [group["lr"] for group in schedule.optimizer.param_groups]


def stepped(schedule, *results):
    for result in results:
        schedule.optimizer.step()
        schedule.step(*result)
    return schedule


def test_a_function_continues_as_saved_where_nothing_changed():
    saved = stepped(falling(1.0, 2.0), (), (), ())
    resumed = falling(1.0, 2.0)
    resumed.optimizer.load_state_dict(saved.optimizer.state_dict())
    continue_function(resumed, saved.state_dict(), [], None)
    assert rates(resumed) == rates(saved) == pytest.approx([0.7, 1.4])
    assert rates(stepped(resumed, ())) == rates(stepped(saved, ()))


def test_a_changed_rate_and_position_act_at_once():
    saved = stepped(falling(1.0, 2.0), (), (), ())
    resumed = falling(1.0, 2.0)
    continue_function(resumed, saved.state_dict(), [GroupChange(1, "learning_rate", 2.0, 4.0)], 5)
    assert rates(resumed) == resumed.get_last_lr() == pytest.approx([0.5, 2.0])
    assert [group["initial_lr"] for group in resumed.optimizer.param_groups] == [1.0, 4.0]
    assert (resumed.last_epoch, resumed._step_count) == (5, 6)
    assert rates(stepped(resumed, ())) == pytest.approx([0.4, 1.6])
    afresh = falling(3.0)
    continue_function(afresh, None, [], 2)
    assert rates(afresh) == pytest.approx([2.4])


def test_a_schedule_that_follows_keeps_what_it_lowered_and_takes_changed_options():
    saved = stepped(plateau(1.0, 4.0), (1.0,), (1.0,))
    assert rates(saved) == [0.5, 2.0]
    options = describe_schedule(plateau(1.0, 4.0))["options"]
    resumed = plateau(1.0, 6.0, patience=2)
    resumed.optimizer.load_state_dict(saved.optimizer.state_dict())
    continue_following(resumed, saved.state_dict(), [GroupChange(1, "learning_rate", 4.0, 6.0)], options)
    assert rates(resumed) == resumed.get_last_lr() == [0.5, 3.0]
    assert (resumed.patience, resumed.best, resumed.factor) == (2, 1.0, 0.5)
    assert rates(stepped(resumed, (1.0,), (1.0,))) == [0.5, 3.0]
    assert rates(stepped(resumed, (1.0,))) == [0.25, 1.5]


def test_a_changed_mode_is_the_one_that_judges():
    saved = stepped(plateau(1.0, mode="min"), (1.0,))
    resumed = plateau(1.0, mode="max")
    resumed.optimizer.load_state_dict(saved.optimizer.state_dict())
    continue_following(resumed, saved.state_dict(), [], describe_schedule(plateau(1.0))["options"])
    assert resumed.mode == "max"
    assert rates(stepped(resumed, (2.0,))) == [1.0]
    assert rates(stepped(resumed, (1.5,))) == [0.5]


def test_a_rate_that_was_zero_becomes_the_current_one():
    resumed = plateau(0.0)
    continue_following(resumed, None, [GroupChange(0, "learning_rate", 0.0, 3.0)], {})
    assert rates(resumed) == [3.0]


def test_the_state_of_another_kind_is_refused_both_ways():
    with pytest.raises(ValueError, match="is not a LambdaLR"):
        load_as_saved(falling(1.0), plateau(1.0).state_dict())
    with pytest.raises(ValueError, match="is not a ReduceLROnPlateau"):
        load_as_saved(plateau(1.0), falling(1.0).state_dict())


def test_options_are_plain_values_of_what_follows_evaluations():
    assert describe_schedule(falling(1.0)) == {"kind": "LambdaLR", "options": {}}
    found = describe_schedule(plateau(1.0))
    assert found["kind"] == "ReduceLROnPlateau"
    assert (found["options"]["factor"], found["options"]["patience"], found["options"]["mode"]) == (0.5, 0, "min")
    assert not {"optimizer", "best", "_last_lr"} & set(found["options"])  # best is infinite at first
