"""Write the log entries of a run to `metrics.csv`, one row each, for spreadsheets."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

from tr_log.formatting import to_scalar
from tr_log.line_file import LineFile
from tr_log.loggers import get_logger
from tr_log.run_file import Entry, RunFile, entries_until

logger = get_logger(__name__)

_MOST_DIGITS = 19  # of a step


class CsvFile(RunFile):
    """A trainer callback that writes one row for each log entry, on the main process.

    There is a column for every logged name, `step` first. An entry with a new name rewrites the whole file, which
    happens a few times in a run. The rows are kept in memory for it.

    Args:
        name: the file's name in the output folder.
    """

    def __init__(self, name: str = "metrics.csv") -> None:
        super().__init__(name)
        self._rows: list[Entry] | None = None
        self._columns: list[str] = []
        self._is_to_mend = False
        self._unplaced: list[Entry] = []

    @classmethod
    def from_arguments(cls, args: Any) -> CsvFile:
        """Return one for a trainer with these arguments; `output_dir` is read when it is needed."""
        return cls()

    def append(self, file: LineFile, entry: dict[str, Any]) -> None:
        """Add one row, and columns for its new names."""
        # Names are as in the file. Otherwise a resumed run, which reads the file, would add a second column.
        self._unplaced.append({_one_line(name): value for name, value in entry.items()})
        try:
            rows = self._known(file)
        except OSError as error:  # never overwrite rows that could not be read
            file.report(error)
            return
        while self._unplaced:
            row = self._unplaced.pop(0)
            rows.append(row)
            if set(row) <= set(self._columns):
                file.append(_line(row, self._columns))
            else:
                self._columns = _columns(rows)
                file.replace(_table(rows, self._columns))

    def wind_back(self, file: LineFile, step: int, history: Sequence[Entry]) -> tuple[int, int]:
        """Keep the rows that were logged before the checkpoint of `step`."""
        self.forget()
        before = self._known(file)
        kept = entries_until(before, step, history)
        if kept != before or self._is_to_mend:
            self._rows, self._columns = list(kept), _columns(kept)
            file.replace(_table(kept, self._columns))
        return len(kept), len(before)

    def forget(self) -> None:
        """Drop the rows in memory; the file is another run's."""
        self._rows, self._columns = None, []

    def _known(self, file: LineFile) -> list[Entry]:
        if self._rows is None:
            lines = file.read()
            self._columns, rows, unreadable = _parsed(lines)
            self._is_to_mend = bool(unreadable)
            if unreadable:
                logger.warning("%s: %d of %d rows are not readable and are dropped", file.path, unreadable, len(lines))
            self._rows = [
                {name: text for name, text in row.items() if text} | {"step": int(row["step"])}
                for row in rows
                if (row.get("step") or "").isdecimal() and len(row["step"]) < _MOST_DIGITS
            ]
        return self._rows


def _parsed(lines: list[str]) -> tuple[list[str], list[dict[str, str]], int]:
    """Return the columns and rows of a table, and the number of unreadable rows."""
    reader = csv.reader(lines)
    columns: list[str] | None = None
    rows, unreadable = [], 0
    while True:
        try:
            row = next(reader, None)
        except csv.Error:  # a cell longer than the csv module allows
            unreadable += 1
            continue
        if row is None:
            return columns or [], rows, unreadable
        if columns is None:
            columns = row
        elif row:
            rows.append(dict(zip(columns, row, strict=False)))


def _columns(rows: Iterable[Entry]) -> list[str]:
    return list(dict.fromkeys(["step", *(name for row in rows for name in row)]))


def _table(rows: Iterable[Entry], columns: list[str]) -> list[str]:
    return [_line(dict(zip(columns, columns, strict=True)), columns), *(_line(row, columns) for row in rows)]


def _line(row: Entry, columns: list[str]) -> str:
    out = io.StringIO()
    # One row is one line. A line break in a value would make two when a half line is repaired after a crash.
    cells = (_one_line(to_scalar(row[name])) if name in row else "" for name in columns)
    csv.writer(out, lineterminator="").writerow(cells)
    return out.getvalue()


def _one_line(item: Any) -> str:
    return " ".join(str(item).splitlines())
