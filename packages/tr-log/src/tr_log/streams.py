"""Write to streams that may be closed, and give streams to a process without any."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import sys
from collections.abc import Iterator
from typing import Any, TextIO

_PATIENCE_S = 5.0  # how long to wait for room in a nonblocking stream


def write_text(stream: TextIO | None, text: str) -> None:
    """Write text without buffering. If the stream is gone, the text is lost, and nothing raises.

    A daemon's stream is None or closed; a pipe may have no reader, a terminal may be lost, a disk may be full.
    Characters that the stream's encoding lacks are escaped. Nothing stays in the buffer of the process's own streams:
    the next write, or the end of the interpreter, would fail for it.
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
    """Replace a missing or closed `sys.stdout` or `sys.stderr` by the null device, inside a block.

    Otherwise warnings, prints and progress bars of other libraries would raise. Free descriptors from 0 to 2 are opened
    on the null device for good: the next opened file would get one, and with it the output of compiled code. Output of
    the block that cannot be written is dropped at its end: the interpreter would try to write it once more, and end a
    successful run with exit code 120.
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
    """Flush stdout and stderr; skip closed ones."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def _put_back(name: str, nowhere: TextIO, stream: Any) -> None:
    if getattr(sys, name) is nowhere:  # else other code has replaced it
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
                opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
                os.set_inheritable(opened, True)


def _unbuffered(stream: TextIO) -> int | None:
    """Return the descriptor of the process's own stdout or stderr; None for any other stream."""
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
