import io

import pytest

from tr_log.terminal import is_terminal


class Teletype(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, True),
        ({"CI": ""}, True),
        ({"CI": "false"}, True),
        ({"CI": "0"}, True),
        ({"CI": "true"}, False),
        ({"CI": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_bars_take_a_terminal_that_is_no_build_servers(monkeypatch, variables, expected):
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_terminal(Teletype()) is expected


def test_files_closed_streams_and_none_are_no_terminals():
    closed = io.StringIO()
    closed.close()
    assert not is_terminal(io.StringIO())
    assert not is_terminal(closed)
    assert not is_terminal(None)
