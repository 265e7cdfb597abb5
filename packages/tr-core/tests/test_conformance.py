from contextlib import AbstractContextManager
from types import SimpleNamespace

import pytest
import torch

from tr_core import SingleDevice
from tr_core.optim.fused_backward import kind, skips_nonfinite
from tr_core.single_device import complete_strategy
from tr_core.testing import check_strategy


@pytest.mark.parametrize("device", ["cpu"])
def test_a_single_device_keeps_the_promises_of_a_strategy(device):
    check_strategy(SingleDevice(device))


def test_an_object_that_lacks_methods_is_named_with_them():
    with pytest.raises(AssertionError, match="object lacks .*clip_grad_norm.* which Strategy has"):
        check_strategy(object())


class OfTheUser:
    """A strategy by composition, which leaves out what `StrategyDefaults` has."""

    forward_is_collective = False

    def __init__(self):
        self._single = SingleDevice("cpu")
        for name in (
            *(
                "device",
                "rank",
                "local_rank",
                "world_size",
                "sum",
                "gather",
                "gather_objects",
                "all_reduce_max",
                "barrier",
            ),
            *("prepare", "unwrap", "accumulate", "autocast", "backward", "clip_grad_norm", "step"),
            *("state_parts", "full_state_dict", "close"),
        ):
            setattr(self, name, getattr(self._single, name))


def test_a_strategy_of_a_user_is_completed_with_what_it_leaves_out_and_stays_the_same_object():
    strategy = OfTheUser()
    assert complete_strategy(strategy) is strategy
    assert strategy.binds_optimizer is False
    strategy.bind_optimizer(torch.nn.Linear(2, 2), None)
    parameter = torch.nn.Parameter(torch.ones(2))
    with strategy.gathered(parameter) as whole:
        assert whole is parameter
    assert isinstance(strategy.accumulate_fused(torch.nn.Linear(2, 2), last=True), AbstractContextManager)
    check_strategy(OfTheUser())


def test_a_strategy_that_defines_bind_optimizer_alone_is_said_to_bind_optimizers():
    bound = []

    class Binding(OfTheUser):
        def bind_optimizer(self, model, optimizer):
            bound.append(optimizer)

    strategy = complete_strategy(Binding())
    assert strategy.binds_optimizer is True
    strategy.bind_optimizer(None, "optimizer")
    assert bound == ["optimizer"]


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [
        ({}, "step"),
        ({"fused_in_backward": False, "updates_in_backward": True}, "step"),
        ({"fused_in_backward": True, "updates_in_backward": False}, "backward"),
        ({"fused_in_backward": True, "updates_in_backward": True}, "backward-update"),
        ({"fused_in_backward": True}, "backward-update"),
    ],
)
def test_one_function_says_when_an_optimizer_uses_gradients(attributes, expected):
    assert kind(SimpleNamespace(**attributes)) == expected
    assert skips_nonfinite(SimpleNamespace(leaves_out_nonfinite=True))
    assert not skips_nonfinite(SimpleNamespace())
