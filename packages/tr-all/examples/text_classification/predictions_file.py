"""Write down what a model predicted."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from labelled_text import Sample


def write_predictions(
    path: Path, samples: Sequence[Sample], order: Sequence[int], logits: np.ndarray, names: Sequence[str]
) -> None:
    """Write one line for each sample, in the order of the file: its class, how probable it is, and the right one.

    Args:
        path: the CSV file.
        samples: in the order of the file.
        order: place among `samples` of each row of `logits`.
        logits: shape `(samples, classes)`.
        names: names of the classes.
    """
    shares = probabilities(logits)[np.argsort(order)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["index", "prediction", "probability", "label"])
        for index, (sample, row) in enumerate(zip(samples, shares, strict=True)):
            writer.writerow([index, names[int(row.argmax())], f"{row.max():.4f}", sample.label or ""])


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Return the softmax of `logits` over the last dimension, in double precision."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    exponentials = np.exp(shifted)
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
