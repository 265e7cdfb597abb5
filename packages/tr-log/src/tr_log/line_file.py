"""Append lines to a file; a crash or a full disk neither leaves half a line nor loses one unreported."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tr_log.loggers import get_logger

logger = get_logger(__name__)


class LineFile:
    """A text file that grows by whole lines. The system has each line when `append` returns.

    A failed write never raises. It is reported once for each kind of failure, the lines wait in memory, and the next
    `append` tries again. A process that dies may leave half a line; the next process that appends removes it.

    Args:
        path: the file. It and its folder are created with the first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._whole: list[str] | None = None  # lines that replace the whole file, before the waiting ones
        self._waiting: list[str] = []
        self._reported: set[str] = set()
        self._has_sound_end = False

    def append(self, line: str) -> None:
        """Add one line, given without a line break."""
        self._waiting.append(line)
        self._try()

    def replace(self, lines: list[str]) -> None:
        """Replace all lines, including those that wait in memory.

        Atomic: a crash leaves either the old or the new lines.
        """
        self._whole = lines
        self._waiting.clear()
        self._try()

    def close(self) -> None:
        """Try to write the waiting lines once more, and log the number of lost ones if that fails."""
        self._try()
        if self._waiting or self._whole is not None:
            logger.warning(
                "%s could not be brought up to date: the last %d entries are not in it; "
                "free space or make the folder writable before the next run",
                self.path,
                len(self._waiting) + len(self._whole or []),
            )
            self._waiting.clear()
            self._whole = None

    def read(self) -> list[str]:
        """Return the complete lines; none if there is no file.

        Raises:
            OSError: the file exists and cannot be read.
        """
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return []
        # Not splitlines(): it also splits at NEL, U+2028 and others, which values may contain.
        return content.decode("utf-8", "replace").split("\n")[:-1]

    def read_objects(self) -> list[dict[str, Any] | None]:
        """Return what each complete line holds, a JSON object; None for a line that holds none.

        Raises:
            OSError: the file exists and cannot be read.
        """
        return [_object(line) for line in self.read()]

    def set_aside(self) -> Path | None:
        """Rename the file to the next free one of `metrics-1.jsonl`, `metrics-2.jsonl`, ...

        Returns:
            The new path, or None if there was no file or an empty one.

        Raises:
            OSError: it could not be renamed.
        """
        if not self.path.exists() or self.path.stat().st_size == 0:
            return None
        stem, suffix = self.path.stem, self.path.suffix
        taken = (p.stem.removeprefix(f"{stem}-") for p in self.path.parent.glob(f"{stem}-*{suffix}"))
        number = 1 + max((int(text) for text in taken if text.isdecimal()), default=0)
        aside = create_unique(self.path.parent, lambda tries: f"{stem}-{number + tries}{suffix}")
        self.path.replace(aside)
        return aside

    def report(self, error: OSError) -> None:
        """Log a failure as a warning, unless its kind was reported since the last success."""
        kind = f"{type(error).__name__} {error.errno}"
        if kind not in self._reported:
            self._reported.add(kind)
            logger.warning(
                "cannot write %s: %s; training goes on, the entries are kept in memory and tried again "
                "with the next one: free space or make the folder writable",
                self.path,
                error.strerror or error,
            )

    def _try(self) -> None:
        if self._whole is None and not self._waiting:
            return
        try:
            if self._whole is not None:
                self._write_whole(self._whole)
                self._whole = None
            if self._waiting:
                self._write("".join(line + "\n" for line in self._waiting))
                self._waiting.clear()
        except OSError as error:
            self.report(error)
            return
        if self._reported:
            logger.info("%s can be written again; no entry is missing", self.path)
            self._reported.clear()

    def _write_whole(self, lines: list[str]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, _encoded("".join(line + "\n" for line in lines)))
        self._has_sound_end = True

    def _write(self, text: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Opened each time, because the file may have been moved or the disk remounted.
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        try:
            if not self._has_sound_end:
                _cut_half_line(descriptor)
            size = os.fstat(descriptor).st_size
            self._has_sound_end = False
            try:
                rest = memoryview(_encoded(text))
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, size)
                raise
            self._has_sound_end = True
        finally:
            os.close(descriptor)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file beside its place, under a name that no other writer has, onto the disk, and move it there.

    Raises:
        OSError: it cannot be written; what was there is unchanged.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")  # two machines may share a number
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            _sync(file.fileno())
        beside.replace(path)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)


def create_unique(folder: Path, name: Callable[[int], str]) -> Path:
    """Create an empty file under the first name that no file has, among those that `name` returns for 0, 1, ...

    Raises:
        OSError: it cannot be created.
    """
    for tries in itertools.count():
        path = folder / name(tries)
        with contextlib.suppress(FileExistsError), path.open("xb"):
            return path
    raise AssertionError  # there is always a next name


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync. On those, a power cut may lose both the old and the new lines.
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
            raise


def _object(line: str) -> dict[str, Any] | None:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return item if isinstance(item, dict) else None


def _encoded(text: str) -> bytes:
    # A lone surrogate has no UTF-8 form; as \udc80 it is still a valid escape in JSON.
    return text.encode("utf-8", "backslashreplace")


def _cut_half_line(descriptor: int) -> None:
    size = end = os.lseek(descriptor, 0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - 65536)
        os.lseek(descriptor, begin, os.SEEK_SET)
        newline = os.read(descriptor, end - begin).rfind(b"\n")
        if newline >= 0:
            end = begin + newline + 1
            break
        end = begin
    if end < size:
        os.ftruncate(descriptor, end)
