"""Keep the earlier entries of a long log in files beside the checkpoints, so that a save does not write all of them.

`log_history/` in the output folder holds files of `ENTRIES` entries each, one a line, which are written once. The first
line of a file names the one before it. A checkpoint names the last of its files, and holds the entries after that one
itself. So it stays valid whatever later runs log. A run of fewer entries makes no file.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from tr_core.state import TrainerState
from tr_log import get_logger

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
        self._last: dict[str, Any] | None = None  # names the file with the last of them, and its digest
        self._ends: tuple[Any, Any] = (None, None)  # the first and the last of them
        self._folder: Path | None = None
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return how many entries are in files, and which file is the last."""
        return {"count": self.count, "last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Note what was saved; `read` then reads the files."""
        self._saved = state_dict

    def skip(self, entries: list[dict[str, Any]]) -> None:
        """Leave the log to the rank that writes it."""
        self.count = len(entries)

    def write(self, entries: list[dict[str, Any]], folder: Path) -> None:
        """Write entries to files in `folder` until the checkpoint has to hold fewer than twice `ENTRIES`.

        All begins over if `entries` is another list than at the last call. After an error the checkpoint holds them.
        """
        if folder != self._folder or not self._continues(entries):
            self.count, self._last, self._folder = 0, None, folder
        while len(entries) - self.count >= 2 * ENTRIES:
            following = entries[self.count : self.count + ENTRIES]
            if not all(map(_is_plain, following)):
                return  # a checkpoint holds more kinds of values than JSON
            try:
                self._last = _write(folder, following, self._last, self.count)
            except OSError as error:
                logger.warning("earlier log entries stay in the checkpoints: %s cannot be written (%s)", folder, error)
                return
            self.count += ENTRIES
            self._ends = entries[0], entries[self.count - 1]

    def read(self, state: TrainerState, folders: list[Path]) -> None:
        """Put the entries of files before those that the restored checkpoint held itself."""
        if self._saved is None:
            return
        last, count = self._saved["last"], self._saved["count"]
        folder = next((each for each in folders if last is not None and (each / last["name"]).is_file()), folders[0])
        pieces: list[list[dict[str, Any]]] = []
        link = last
        try:
            while link is not None:
                link, piece = _read(folder, link)
                pieces.append(piece)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                "the first %s of the logged entries are missing from state.log_history: they were in %s (%s); nothing "
                "else depends on them, and the metrics of the run are in its metrics.jsonl",
                f"{count - sum(map(len, pieces)):,}",
                folder,
                error,
            )
        state.log_history[:0] = [entry for piece in reversed(pieces) for entry in piece]
        if link is None and count:
            self.count, self._last, self._folder = count, last, folder
            self._ends = state.log_history[0], state.log_history[count - 1]

    def _continues(self, entries: list[dict[str, Any]]) -> bool:
        return self.count == 0 or (
            len(entries) >= self.count and entries[0] is self._ends[0] and entries[self.count - 1] is self._ends[1]
        )


class SavedState:
    """The state of the trainer as a checkpoint holds it: without the entries that are in files."""

    def __init__(self, state: TrainerState, files: LogFiles) -> None:
        self._state, self._files = state, files

    def state_dict(self) -> dict[str, Any]:
        """Return the fields, with the entries after those in files."""
        return self._state.state_dict(self._files.count)

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Restore the fields."""
        self._state.load_state_dict(state_dict)


def _is_plain(entry: dict[str, Any]) -> bool:
    return all(type(name) is str and type(value) in _PLAIN for name, value in entry.items())


def _write(folder: Path, entries: list[dict[str, Any]], before: dict[str, Any] | None, start: int) -> dict[str, Any]:
    lines = [json.dumps({"before": before}), *map(json.dumps, entries)]
    content = "\n".join([*lines, ""]).encode()
    digest = hashlib.sha256(content).hexdigest()
    name = f"{start:012d}-{digest[:12]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"{name}.{os.getpid()}"
    with open(fresh, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, folder / name)
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
        raise ValueError(f"{link['name']!r} is no file of it")
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != link["sha256"]:
        raise ValueError(f"{path.name} was changed after it was written")
    first, *entries = content.decode().splitlines()
    return json.loads(first)["before"], [json.loads(entry) for entry in entries]
