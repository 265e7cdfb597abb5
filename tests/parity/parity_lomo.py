"""What the comparisons with lomo-optim train."""

import torch
from torch import nn


class Network(nn.Module):
    """Two layers with a norm between them; what it returns is its loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 8))

    def forward(self, inputs):
        return self.layers(inputs).square().mean()


def batches(number=10):
    return list(torch.randn(number, 8, 16, generator=torch.Generator().manual_seed(1)))


def rates(number=10):
    return [0.1 * (1 - step / number) for step in range(number)]
