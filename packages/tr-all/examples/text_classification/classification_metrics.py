"""Measure how good predicted classes are."""

from __future__ import annotations

import numpy as np


def classification_metrics(predicted: np.ndarray, actual: np.ndarray) -> dict[str, float]:
    """Return accuracy and macro F1.

    Macro F1 is the plain mean of the F1 of every class that occurs in `predicted` or `actual`, so that rare classes
    count as much as frequent ones.

    Args:
        predicted: class numbers, shape `(samples,)`.
        actual: the right ones, shape `(samples,)`.
    """
    scores = []
    for label in np.union1d(predicted, actual):
        hits = np.sum((predicted == label) & (actual == label))
        # F1 = 2 TP / (2 TP + FP + FN), and the sum below is TP + FP and TP + FN together.
        scores.append(2 * hits / (np.sum(predicted == label) + np.sum(actual == label)))
    return {"accuracy": float(np.mean(predicted == actual)), "f1": float(np.mean(scores))}
