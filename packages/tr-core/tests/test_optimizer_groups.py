"""What an optimizer remembers, by its groups and in a checkpoint."""

import pytest
import torch
from torch import nn

from tr_core.checkpoint.optimizer_groups import _state_names, check_state_shapes


class NeedsRate(torch.optim.SGD):
    def __init__(self, params, lr, momentum):
        super().__init__(params, lr=lr, momentum=momentum)


class BuiltOtherwise(torch.optim.SGD):
    def __init__(self, params, lr, model):
        super().__init__(params, lr=lr)


@pytest.mark.parametrize(
    ("kind", "group", "expected"),
    [
        (torch.optim.SGD, {"lr": 1.0, "momentum": 0.9}, {"momentum_buffer"}),
        (torch.optim.AdamW, {"lr": 1.0, "amsgrad": False}, {"step", "exp_avg", "exp_avg_sq"}),
        (torch.optim.AdamW, {"lr": 1.0, "amsgrad": True}, {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (NeedsRate, {"lr": 1.0, "momentum": 0.9}, {"momentum_buffer"}),
        (BuiltOtherwise, {"lr": 1.0}, set()),
    ],
)
def test_what_an_optimizer_remembers_is_found_by_a_step_of_one_of_its_kind(kind, group, expected):
    assert _state_names(kind, group) == expected


def test_optimizer_state_of_another_shape_is_an_error():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    check_state_shapes(optimizer, model)
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(2, 8)
    with pytest.raises(ValueError, match=r"exp_avg of weight has the shape \(2, 8\), the parameter \(4, 4\)"):
        check_state_shapes(optimizer, model)
