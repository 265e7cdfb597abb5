import pytest
import torch

from tr_core.checkpoint.optimizer_groups import _state_names


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
