"""Divided modules that take one tensor: its gradient is summed once, and is that of one process."""

import copy

import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from tr_dist.mesh import Mesh
from tr_dist.mesh.tensor import Tensor
from tr_dist.testing import run_ranks


class Four(nn.Module):
    """Takes one tensor twice, then the same object with other numbers, then another tensor."""

    def __init__(self):
        super().__init__()
        self.into = nn.Linear(4, 4)
        self.ups, self.down = nn.ModuleList(nn.Linear(4, 6) for _ in range(4)), nn.Linear(6, 4)
        self.ups[:2].requires_grad_(False)  # torch refuses to change what their weights' gradients would need

    def forward(self, x):
        x = self.into(x)
        first = self.ups[0](x) * self.ups[1](x)
        x *= x.detach().sin()
        return self.down(first + self.ups[2](x) * self.ups[3](x.cos())).square().sum()


def train():
    torch.manual_seed(0)
    alone, x = Four(), torch.randn(3, 4)
    strategy = Mesh(directions=[Tensor(2, {"ups.*": "colwise", "down": "rowwise"})], use_cpu=True)
    model = strategy.prepare(copy.deepcopy(alone))
    alone(x).backward()
    loss = model(x)
    with CommDebugMode() as backward:
        strategy.backward(loss)
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        if expected.requires_grad:
            torch.testing.assert_close(mine.grad.full_tensor(), expected.grad)
    strategy.close()
    return backward.get_comm_counts()[torch.ops.c10d_functional.all_reduce]


def test_the_gradient_of_one_input_of_several_modules_is_summed_once():
    assert run_ranks(train, 2, timeout_s=120) == [3, 3]
