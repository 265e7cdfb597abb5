"""Read configuration files of limited size, and JSON of limited depth.

`tr_dist/bounded_text.py` is the same on purpose: neither package imports the other.
"""

from __future__ import annotations

import json
import math
import os
import re
import select
import stat
import time
from pathlib import Path
from typing import Any

MOST_BYTES = 16 << 20
MOST_LEVELS = 64  # mappings and lists within each other; the deepest real configurations have six or so
MOST_DIGITS = 400  # more than any float has; Python itself refuses to write 4,300
PIPE_PATIENCE_S = 300.0  # the program behind a pipe may ask for a password first

# The end of the text also ends a string. Otherwise each quote in an unclosed string would start a new search.
_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\Z)|([\[{])|([\]}])', re.DOTALL)


class ContentError(ValueError):
    """A file or text cannot be used; the message says why and starts with a verb."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def read_text(path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> str:
    """Read a text file or a pipe, without its byte order mark.

    Args:
        path: a regular file, a pipe such as a shell's `<(...)` makes, or the null device, which is empty; `~` is the
            home folder.
        most_bytes: a larger file is refused, and never held in memory.

    Raises:
        ContentError: it is something else, is too large, is not UTF-8, or cannot be read.
    """
    try:
        content = _bytes_of(Path(path).expanduser(), most_bytes)
    except FileNotFoundError:
        raise ContentError("does not exist") from None
    except OSError as error:
        raise ContentError(f"cannot be read: {error.strerror or error}") from None
    except (ValueError, RuntimeError) as error:  # a NUL in the path; the home of an unknown user
        if isinstance(error, ContentError):
            raise
        raise ContentError(f"cannot be read: {error}") from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ContentError(f"is not UTF-8 text: line {line} has the byte 0x{content[error.start]:02x}") from None


def load_json(text: str) -> Any:
    """Parse JSON text.

    Raises:
        ContentError: it is not JSON, is nested too deeply, has a key twice or a number that no float holds.
    """
    _check_levels(text)
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=_whole_number, parse_float=number)
    except json.JSONDecodeError as error:
        raise ContentError(f"is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}") from error


def printable(text: str) -> str:
    """Escape the control characters of a text, except line breaks and tabs, so that a terminal only shows them."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def number(text: str) -> float:
    """Parse a float.

    Raises:
        ContentError: it has too many digits, or a float would silently become infinite or 0.
    """
    check_digits(text)
    value = float(text)
    if math.isinf(value) and "inf" not in text.lower():
        raise ContentError(f"has the number {text}, which is too large; the largest is about 1.8e308")
    if value == 0 and re.search("[1-9]", re.split("[eE]", text)[0]):
        raise ContentError(f"has the number {text}, which is too small; the smallest is about 4.9e-324")
    return value


def check_digits(text: str) -> None:
    """Refuse a number with too many digits.

    Raises:
        ContentError: it has more than `MOST_DIGITS` characters.
    """
    if len(text) > MOST_DIGITS:
        raise ContentError(f"has a number of {len(text):,} characters, {text[:20]}...; at most {MOST_DIGITS} are taken")


def check_depth(content: Any) -> None:
    """Refuse mappings and lists that are nested too deeply. No object may be in `content` twice.

    Raises:
        ContentError: there are more than `MOST_LEVELS` levels.
    """
    level, depth = [content], 0
    while level:
        if depth > MOST_LEVELS:
            raise ContentError(f"is nested more than {MOST_LEVELS} levels deep")
        level = [inner for outer in level for inner in _within(outer)]
        depth += 1


def _within(outer: Any) -> Any:
    if isinstance(outer, dict):
        return outer.values()
    return outer if isinstance(outer, list) else ()


def _bytes_of(path: Path, most_bytes: int) -> bytes:
    kind = os.stat(path)
    if stat.S_ISCHR(kind.st_mode) and kind.st_rdev == os.stat(os.devnull).st_rdev:
        return b""
    if stat.S_ISDIR(kind.st_mode):
        raise ContentError("is a folder; give a file in it")
    if not (stat.S_ISREG(kind.st_mode) or stat.S_ISFIFO(kind.st_mode)):
        raise ContentError("is a device or a socket; give a file")
    # A blocking open would wait for a writer of the pipe, which may never come.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        return _until_the_end(descriptor, most_bytes)
    finally:
        os.close(descriptor)


def _until_the_end(descriptor: int, most_bytes: int) -> bytes:
    is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    deadline = time.monotonic() + PIPE_PATIENCE_S
    content = bytearray()
    while True:
        if is_pipe and not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise ContentError(f"is a pipe to whose end nothing came within {PIPE_PATIENCE_S:g} s")
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            return bytes(content)
        content += chunk
        if len(content) > most_bytes:
            raise ContentError(f"holds more than {most_bytes:,} bytes, which no configuration needs")


def _check_levels(text: str) -> None:
    """Check the depth of the brackets before a recursive parser reads them."""
    if text.count("[") + text.count("{") <= MOST_LEVELS:
        return
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += bool(match[1]) - bool(match[2])
        if depth > MOST_LEVELS:
            line = text.count("\n", 0, match.start()) + 1
            raise ContentError(f"is nested more than {MOST_LEVELS} levels deep, on line {line}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise ContentError(f"has the key {key[:100]} twice; keep one")
        mapping[key] = value
    return mapping


def _whole_number(text: str) -> int:
    check_digits(text)
    return int(text)
