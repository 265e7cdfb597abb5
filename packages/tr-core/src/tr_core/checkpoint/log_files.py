"""Keep the earlier entries of a long log in files beside the checkpoints, so that a save does not write all of them.

`log_history/` in the output folder holds files of `ENTRIES` entries each, one a line, which are written once. The first
line of a file names the one before it. A checkpoint names the last of its files, and holds the entries after that one
itself. So it stays valid whatever later runs log. A run of fewer entries makes no file.

A save compares the entries with what is in the files, which takes a fiftieth of the time of writing them: from the
first file with an edited entry, they are written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from tr_log import get_logger
from tr_log.line_file import write_whole

logger = get_logger("tr_core.trainer")

FOLDER = "log_history"
ENTRIES = 1000

_PLAIN = (str, int, float, bool, type(None))


class LogFiles:
    """The files with the earlier entries of one run's `log_history`, which stays the full list.

    Attributes:
        count: how many entries are in files.
    """

    def __init__(self) -> None:
        self.count = 0
        self._files: list[_File] = []
        self._folder: Path | None = None
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return how many entries are in files, where, and which file is the last."""
        last = self._files[-1].link if self._files else None
        return {"entries": self.count, "folder": f"../{FOLDER}", "last": last}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Note what was saved; `read` then reads the files.

        Raises:
            ValueError: it names no files.
        """
        match state_dict:
            case {"entries": int(), "last": {"name": str(), "sha256": str()}}:
                self._saved = state_dict
            case _:
                raise ValueError(f"{state_dict!r} does not name the files of the earlier log entries")

    def skip(self, entries: list[dict[str, Any]]) -> None:
        """Leave the log to the rank that writes it."""
        self.count = len(entries)

    def leave_out(self) -> None:
        """Have the checkpoints hold all entries."""
        self.count, self._files = 0, []

    def write(self, entries: list[dict[str, Any]], folder: Path) -> None:
        """Write entries to files in `folder` until the checkpoint has to hold fewer than twice `ENTRIES`.

        What was changed since it was written is written again. After an error the checkpoint holds the entries.
        """
        if folder != self._folder:
            self._files, self._folder = [], folder
        self._forget_what_changed(entries)
        while len(entries) - self.count >= 2 * ENTRIES:
            following = entries[self.count : self.count + ENTRIES]
            if not all(map(_is_plain, following)):
                return  # a checkpoint holds more kinds of values than JSON
            try:
                link = _write(folder, following, self._files[-1].link if self._files else None, self.count)
            except OSError as error:
                logger.warning("earlier log entries stay in the checkpoints: %s cannot be written (%s)", folder, error)
                return
            self._add(link, following)

    def read(self, entries: list[dict[str, Any]], folders: list[Path]) -> None:
        """Put the entries of files before the checkpoint's own; those of the first folder that has the last file."""
        if self._saved is None:
            return
        link, found = self._saved["last"], []
        folder = next((each for each in folders if os.path.isfile(each / link["name"])), folders[0])
        try:
            while link is not None:
                before, piece = _read(folder, link)
                found.append((link, piece))
                link = before
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                "the first %s of the logged entries are missing from state.log_history: they were in %s (%s); nothing "
                "else depends on them, and the metrics of the run are in its metrics.jsonl",
                f"{self._saved['entries'] - sum(len(piece) for _, piece in found):,}",
                folder,
                error,
            )
        entries[:0] = [entry for _, piece in reversed(found) for entry in piece]
        if link is None:
            self._folder = folder
            for written, piece in reversed(found):
                self._add(written, piece)

    def _add(self, link: dict[str, Any], entries: list[dict[str, Any]]) -> None:
        self._files.append(_File(link, [dict(entry) for entry in entries]))
        self.count += len(entries)

    def _forget_what_changed(self, entries: list[dict[str, Any]]) -> None:
        self.count = 0
        for number, file in enumerate(self._files):
            end = self.count + len(file.entries)
            if entries[self.count : end] != file.entries:
                del self._files[number:]
                return
            self.count = end


class _File(NamedTuple):
    link: dict[str, Any]  # its name and digest
    entries: list[dict[str, Any]]  # copies


def _is_plain(entry: dict[str, Any]) -> bool:
    return all(type(name) is str and type(value) in _PLAIN for name, value in entry.items())


def _write(folder: Path, entries: list[dict[str, Any]], before: dict[str, Any] | None, start: int) -> dict[str, Any]:
    lines = [json.dumps({"before": before}), *map(json.dumps, entries)]
    content = "\n".join([*lines, ""]).encode()
    digest = hashlib.sha256(content).hexdigest()
    name = f"{start:012d}-{digest[:12]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / name, content)
    if os.name != "nt":  # a folder has no descriptor there
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError:
            pass  # not supported; the run's checkpoints warn about it
        finally:
            os.close(descriptor)
    return {"name": name, "sha256": digest}


def _read(folder: Path, link: dict[str, Any]) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    path = folder / str(link["name"])
    if path.parent != folder:
        raise ValueError(f"{link['name']!r} is not a file of it")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != link["sha256"]:
        raise ValueError(f"{path.name} was changed after it was written")
    first, *entries = content.decode().splitlines()
    return json.loads(first)["before"], [json.loads(entry) for entry in entries]
