"""Write to streams that may be gone, and have streams where a process has none.

`tr_log/streams.py` is the same on purpose: neither package imports the other.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_PATIENCE_S = 5.0  # with a stream that does not block, until there is room


def write_text(stream: TextIO | None, text: str) -> None:
    """Write text at once, or lose it: a stream that is gone ends no training.

    That is a daemon's, which is None or closed, a pipe that nobody reads any more, a lost terminal, a file on a full
    disk. What the stream's encoding does not hold is escaped. Of the process's own streams nothing stays behind in the
    buffer, or whatever writes next, the interpreter's end included, would fail for it.
    """
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        content = text.encode(encoding, "backslashreplace")
        descriptor = _unbuffered(stream)
        if descriptor is None:
            stream.write(content.decode(encoding))
            stream.flush()
        else:
            stream.flush()
            _write_all(descriptor, content)


@contextlib.contextmanager
def usable_streams() -> Iterator[None]:
    """Have `sys.stdout` and `sys.stderr` that take what is written, where there are none or closed ones, for a block.

    Warnings, prints and other libraries' bars would else raise in the middle of it. Descriptors 0 to 2 that are free
    are led to nowhere, for good: the next file to be opened would get one, and with it what compiled code prints.
    What others printed in the block and cannot be written is dropped at its end: the interpreter would try it once
    more when it ends, and give a run that went well the exit code 120.
    """
    _occupy_descriptors()
    with contextlib.ExitStack() as undo:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is None or getattr(stream, "closed", False):
                nowhere = undo.enter_context(open(os.devnull, "w", encoding="utf-8", errors="backslashreplace"))
                setattr(sys, name, nowhere)
                undo.callback(_put_back, name, nowhere, stream)
            else:
                undo.callback(_drop_what_cannot_be_written, stream)
        yield


def flush_streams() -> None:
    """Write out what was printed; streams that are gone are left alone."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _put_back(name: str, nowhere: TextIO, stream: Any) -> None:
    if getattr(sys, name) is nowhere:  # else somebody has put another one there
        setattr(sys, name, stream)


def _drop_what_cannot_be_written(stream: TextIO) -> None:
    try:
        stream.flush()
    except ValueError:  # closed meanwhile
        return
    except OSError:
        if (descriptor := _unbuffered(stream)) is None:
            return
        kept, nowhere = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, descriptor)
            stream.flush()
        finally:
            os.dup2(kept, descriptor)
            os.close(kept)
            os.close(nowhere)


def _occupy_descriptors() -> None:
    if os.name != "posix":
        return
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError as error:
            if error.errno == errno.EBADF:
                opened = os.open(os.devnull, os.O_RDWR)  # the lowest that is free, which is this one
                os.set_inheritable(opened, True)


def _unbuffered(stream: TextIO) -> int | None:
    """Return the descriptor of one of the process's own streams; others may stand for what no descriptor shows."""
    if os.name != "posix" or (stream is not sys.__stdout__ and stream is not sys.__stderr__):
        return None
    return stream.fileno()


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            if not select.select([], [descriptor], [], _PATIENCE_S)[1]:
                raise
