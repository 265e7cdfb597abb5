import io

import pytest

from tr_log.terminal import is_terminal, write_line


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


def test_a_stream_that_is_gone_is_no_error():
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    write_line(Gone(), "text")


def test_what_a_stream_cannot_encode_is_written_as_escapes():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write_line(stream, "loss → 0")
    assert raw.getvalue() == b"loss \\u2192 0\n"
