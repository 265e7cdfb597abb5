"""The file of predictions."""

import csv

import numpy as np
import pytest
from labelled_text import Sample
from predictions_file import probabilities, write_predictions


def test_predictions_are_written_in_the_order_of_the_file(tmp_path):
    samples = [Sample("a", None, "good"), Sample("b"), Sample("c", None, "bad")]
    order = [2, 0, 1]  # the rows below are those of c, a, b
    logits = np.array([[5.0, 0.0], [0.0, 5.0], [0.0, 0.0]], dtype=np.float32)
    write_predictions(tmp_path / "out.csv", samples, order, logits, ["bad", "good"])
    with (tmp_path / "out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["index"], row["prediction"], row["label"]) for row in rows] == [
        ("0", "good", "good"),
        ("1", "bad", ""),
        ("2", "bad", "bad"),
    ]
    assert [row["probability"] for row in rows] == ["0.9933", "0.5000", "0.9933"]


def test_probabilities_of_huge_logits_are_finite():
    assert probabilities(np.array([[1e4, -1e4]], dtype=np.float32)) == pytest.approx(np.array([[1.0, 0.0]]))
