"""Streams that are none, closed, gone or full end nothing."""

import io
import logging
import os
import subprocess
import sys

import pytest

from tr_log import configure, get_logger
from tr_log.progress import progress, progress_bar
from tr_log.progress_callback import PrinterCallback
from tr_log.streams import usable_streams, write_text


class Broken(io.StringIO):
    """A stream whose every write fails."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


def closed():
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {"none": lambda: None, "closed": closed, "broken": Broken}


@pytest.fixture(params=STREAMS)
def without_streams(request, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, STREAMS[request.param]())


def test_log_records_progress_and_entries_are_lost_in_silence(without_streams):
    configure("info")
    logger = get_logger("tr_core")
    logger.info("lost")
    try:
        raise ValueError("x")
    except ValueError:
        logger.exception("with its traceback")
    assert list(progress(range(3))) == [0, 1, 2]
    with progress_bar("lost", 3) as bar:
        bar.advance()
    state = type("State", (), {"is_world_process_zero": True})
    PrinterCallback().on_log(None, state, None, logs={"loss": 1.0})


def test_there_are_streams_within_the_block_and_the_former_ones_after_it(without_streams):
    before = sys.stdout, sys.stderr
    with usable_streams():
        if not isinstance(before[0], Broken):
            print("lost")
            sys.stderr.write("lost")
            logging.getLogger("of.an.application").warning("lost")
    assert (sys.stdout, sys.stderr) == before


def test_a_stream_that_was_put_in_place_within_the_block_stays(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    own = io.StringIO()
    with usable_streams():
        sys.stdout = own
    assert sys.stdout is own


def test_what_an_encoding_does_not_hold_is_escaped():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write_text(stream, "größe 1\n")
    assert raw.getvalue() == b"gr\\xf6\\xdfe 1\n"


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_what_cannot_be_written_does_not_spoil_the_exit_code():
    code = (
        "import sys, warnings; from tr_log.streams import usable_streams, write_text\n"
        "write_text(sys.stdout, 'lost'); write_text(sys.stderr, 'lost')\n"
        "with usable_streams():\n"
        "    print('lost'); warnings.warn('lost')\n"
    )
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=full, env=kept, timeout=60, check=False)
    assert done.returncode == 0


@pytest.mark.skipif(os.name != "posix", reason="descriptors as POSIX has them")
def test_files_do_not_take_the_place_of_streams_that_are_closed(tmp_path):
    """What compiled code prints to descriptor 1 must not end up in the file that was opened next."""
    code = (
        "import os; from tr_log.streams import usable_streams\n"
        "with usable_streams():\n"
        "    file = open('file', 'w')\n"
        "    os.write(1, b'printed'), os.write(2, b'printed')\n"
        "    file.write('content')\n"
        "file.close()"
    )
    closing = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    subprocess.run(closing, cwd=tmp_path, timeout=60, check=True)
    assert (tmp_path / "file").read_text() == "content"
