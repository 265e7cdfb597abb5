"""What tests of optimizers that consume gradients on several ranks share: data, groups, and collectives that count."""

import torch
from torch import nn

STEPS, SIZE = 9, 12  # optimizer steps, and rows of each


class Regressor(nn.Module):
    """Layers with the mean squared error."""

    def __init__(self, layers):
        super().__init__()
        self.mlp = layers

    def forward(self, x, labels):
        out = self.mlp(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Counted:
    """Collectives that count what they carry."""

    def __init__(self, strategy):
        self._strategy, self.rank, self.world_size = strategy, strategy.rank, strategy.world_size
        self.elements = []

    def sum(self, tensor):
        self.elements.append(tensor.numel())
        return self._strategy.sum(tensor)


def data():
    """Return inputs and targets of all steps."""
    generator = torch.Generator().manual_seed(3)
    return torch.randn(STEPS, SIZE, 16, generator=generator), torch.randn(STEPS, SIZE, 8, generator=generator)


def rows():
    """Return the same, as rows."""
    inputs, targets = data()
    return [{"x": x, "labels": y} for x, y in zip(inputs.flatten(0, 1), targets.flatten(0, 1), strict=True)]


def groups(model):
    """Return the matrices, which are projected, and all else, which does not decay."""
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "rank": 4, "update_proj_gap": 3, "scale": 1.0},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def weights(model):
    """Return all weights in one row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])
