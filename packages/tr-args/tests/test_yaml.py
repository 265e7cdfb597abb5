"""Plain scalars of YAML 1.2."""

import math

import pytest

from tr_args.files import read_mapping


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5e-5", 5e-5),
        ("1.", 1.0),
        (".5", 0.5),
        ("-3", -3),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("-.inf", -math.inf),
        ("'1'", "1"),
        ("1_000", "1_000"),
        ("[1, no, 2.5]", [1, "no", 2.5]),
    ],
)
def test_a_plain_scalar_is_what_yaml_1_2_says(tmp_path, text, expected):
    path = tmp_path / "x.yaml"
    path.write_text(f"key: {text}\n")
    value = read_mapping(path)["key"]
    assert value == expected
    assert type(value) is type(expected)


def test_not_a_number_and_anchors_and_merges_are_read(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("base: &base {a: 1, b: 2}\nmore:\n  <<: *base\n  b: 3\nnan: .nan\n")
    content = read_mapping(path)
    assert content["more"] == {"a": 1, "b": 3}
    assert math.isnan(content["nan"])


@pytest.mark.parametrize("name", ["empty.yaml", "empty.toml"])
def test_an_empty_file_is_an_empty_mapping(tmp_path, name):
    (tmp_path / name).write_text("")
    assert read_mapping(tmp_path / name) == {}
