"""Tables fit the terminal: what can be spared goes first, then the middle of names."""

import pytest

from tr_ckpt.command import terminal
from tr_ckpt.command.listing import size
from tr_ckpt.command.terminal import Column, render, shorten


@pytest.fixture
def columns():
    return [
        Column("name", ["model.layers.0.weight", "short"]),
        Column("size", ["1", "1000"], right=True),
        Column("note", ["spared second", ""], spare=1),
        Column("more", ["spared first", ""], spare=2),
        Column("none", ["", ""]),
    ]


def test_columns_are_aligned_and_those_without_content_are_left_out(columns):
    assert render(columns, None).splitlines() == [
        "name                   size  note           more",
        "model.layers.0.weight     1  spared second  spared first",
        "short                  1000",
    ]


@pytest.mark.parametrize(
    ("width", "heading"),
    [
        (56, "name                   size  note           more"),
        (55, "name                   size  note"),
        (41, "name                   size"),
        (27, "name                   size"),
    ],
)
def test_what_can_be_spared_goes_first(columns, width, heading):
    lines = render(columns, width).splitlines()
    assert lines[0] == heading
    assert max(map(len, lines)) <= width


def test_then_names_lose_their_middles(columns):
    assert render(columns, 22).splitlines() == [
        "name              size",
        "model…s.0.weight     1",
        "short             1000",
    ]


def test_a_name_keeps_enough_to_be_told_by(columns):
    assert len(render(columns, 5).splitlines()[1].split()[0]) == 12


@pytest.mark.parametrize(
    ("text", "width", "shown"),
    [("abcdefgh", None, "abcdefgh"), ("abcdefgh", 8, "abcdefgh"), ("abcdefgh", 7, "ab…efgh"), ("abcdefgh", 4, "a…gh")],
)
def test_a_long_text_loses_its_middle(text, width, shown):
    assert shorten(text, width) == shown


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 B"), (999, "999 B"), (1234, "1.23 kB"), (45_678, "45.7 kB"), (999_999, "1000 kB"), (2.5e12, "2.5 TB")],
)
def test_sizes_are_readable(count, shown):
    assert size(count) == shown


def test_output_that_goes_elsewhere_is_not_cut(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: False, raising=False)
    assert terminal.terminal_width() is None
    monkeypatch.setenv("COLUMNS", "64")
    assert terminal.terminal_width() == 64
