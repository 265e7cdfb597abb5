import json

import pytest

from tr_log.formatting import to_json, to_scalar


class Scalar:
    """What numpy's scalars and tensors have in common."""

    def __init__(self, *values):
        self.values = values

    def item(self):
        if len(self.values) != 1:
            raise ValueError("only one-element arrays can be converted")
        return self.values[0]

    def __str__(self):
        return f"array{self.values}"


class Float(float):
    def __repr__(self):
        return f"float64({float(self)})"


def test_single_numbers_of_other_libraries_become_numbers():
    assert to_scalar(Scalar(0.5)) == 0.5
    assert repr(to_scalar(Float(0.5))) == "0.5"
    assert repr(to_scalar(True)) == "True"


def test_what_holds_several_numbers_stays_as_it_is():
    several = Scalar(1, 2)
    assert to_scalar(several) is several


def refuse(name):
    raise AssertionError(f"not strict JSON: {name}")


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"loss": float("nan")}, '{"loss": "NaN"}'),
        ([float("inf"), -float("inf"), Scalar(float("nan"))], '["Infinity", "-Infinity", "NaN"]'),
        ({"a": {1: (True, None, "ü")}}, '{"a": {"1": [true, null, "ü"]}}'),
        (Scalar(1, 2), '"array(1, 2)"'),
        (Scalar(0.1), "0.1"),
        ("two\nlines", '"two\\nlines"'),
    ],
)
def test_everything_becomes_one_line_of_strict_json(item, text):
    assert to_json(item) == text
    json.loads(to_json(item), parse_constant=refuse)
