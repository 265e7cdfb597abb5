"""Changed options of a restored optimizer, and states that do not fit."""

import pytest
import torch
from torch import nn

from tr_core.checkpoint.optimizer_groups import GroupChange, apply_options, check_state_shapes


class NeedsMomentum(torch.optim.RMSprop):
    def __init__(self, params, lr, momentum):
        super().__init__(params, lr=lr, momentum=momentum)


class NeedsModel(torch.optim.RMSprop):
    def __init__(self, params, model):
        super().__init__(params)


@pytest.mark.parametrize(
    ("kind", "built", "name", "now", "lacks"),
    [
        (torch.optim.AdamW, {}, "amsgrad", True, "max_exp_avg_sq"),
        (torch.optim.RMSprop, {}, "momentum", 0.9, "momentum_buffer"),
        (torch.optim.RMSprop, {}, "centered", True, "grad_avg"),
        (NeedsMomentum, {"lr": 1.0, "momentum": 0}, "momentum", 0.9, "momentum_buffer"),
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad", False, None),
        (NeedsModel, {"model": None}, "momentum", 0.9, None),  # not known: its constructor takes other arguments
    ],
)
def test_an_option_that_needs_more_than_a_checkpoint_holds_is_refused(kind, built, name, now, lacks):
    parameter = nn.Parameter(torch.ones(3))
    optimizer = kind([parameter], **built)
    parameter.grad = torch.ones(3)
    optimizer.step()
    change = GroupChange(0, name, optimizer.param_groups[0][name], now)
    if lacks is None:
        apply_options(optimizer, [change])
    else:
        with pytest.raises(ValueError, match=rf"{name}: {change.saved} -> {now} needs {lacks} of every parameter"):
            apply_options(optimizer, [change])
    assert optimizer.param_groups[0][name] == now


def test_optimizer_state_of_another_shape_is_an_error():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    check_state_shapes(optimizer, model)
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"exp_avg of weight has the shape \(2, 8\), the parameter \(4, 4\)"):
        check_state_shapes(optimizer, model)
