"""Accuracy and F1."""

import numpy as np
import pytest
from classification_metrics import classification_metrics


def test_accuracy_and_macro_f1_of_three_classes():
    metrics = classification_metrics(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 2]))
    # class 0: precision 1/2, recall 1; class 1: precision 1, recall 1/2; class 2: both 1
    assert metrics == pytest.approx({"accuracy": 3 / 4, "f1": (2 / 3 + 2 / 3 + 1) / 3})


def test_a_class_that_is_only_predicted_counts_as_missed():
    assert classification_metrics(np.array([0, 1]), np.array([0, 0])) == pytest.approx({"accuracy": 0.5, "f1": 1 / 3})


def test_a_class_that_does_not_occur_does_not_count():
    assert classification_metrics(np.array([5, 7]), np.array([5, 7])) == {"accuracy": 1.0, "f1": 1.0}
