"""Store the trials of a search in a file, so that an interrupted search can resume."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from tr_log.bounded_text import load_json
from tr_log.formatting import to_json
from tr_log.line_file import LineFile

FILE_NAME = "trials.jsonl"
FINISHED = ("complete", "pruned", "failed")


@dataclass
class TrialRecord:
    """The record of a trial.

    Attributes:
        state: `running`, or how it ended: `complete`, `pruned` or `failed`.
        name: its name from `hp_name`.
        params: its suggested values, by name.
        arguments: the training arguments that it set, with the types of the arguments.
        values: its objectives.
        reports: the objective at each evaluation during training, by step; empty with several objectives.
        distributions: the distributions of the parameters, by name, if the backend needs them.
    """

    number: int
    state: str = "running"
    name: str | None = None
    params: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    values: list[float] = field(default_factory=list)
    reports: dict[int, float] = field(default_factory=dict)
    distributions: dict[str, str] = field(default_factory=dict)
    error: str | None = None

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Its suggested values and the arguments that it set; an argument wins over a value of the same name."""
        return {**self.params, **self.arguments}

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values."""
        return asdict(self)


class Journal:
    """Writes the trials of a search to a file, flushed after each line.

    The first line describes the search. Then each trial has one line when it begins, one for every evaluation and one
    when it ends. A later line updates the earlier ones of its trial.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = LineFile(path)
        self.records: dict[int, TrialRecord] = {}

    def has_trials(self) -> bool:
        """Whether the file holds more than the line of the search."""
        return len(self._file.read()) > 1

    def begin_search(self, search: Mapping[str, Any]) -> None:
        """Create the file, replacing one without trials."""
        self._file.replace([to_json({"search": search})])

    def open(self, search: Mapping[str, Any]) -> None:
        """Load the file to resume its search, or create it.

        Raises:
            ValueError: the file holds another search, or cannot be read.
        """
        lines = self._file.read()
        if not lines:
            self.begin_search(search)
            return
        entries = [self._decoded(number, line) for number, line in enumerate(lines, start=1)]
        try:
            self.records = _merged(entries[1:])
        except (TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ValueError(f"{self.path} holds no trials of a search ({error}); restore it, or remove it") from None
        saved, wanted = entries[0].get("search"), json.loads(to_json(search))
        if saved != wanted:
            raise ValueError(
                f"{self.path} is of another search: {saved}, not {wanted}; give the same, or leave resume=True out "
                "for a new one"
            )

    @property
    def finished(self) -> list[TrialRecord]:
        """The trials that ended, by number."""
        return [self.records[number] for number in sorted(self.records) if self.records[number].state in FINISHED]

    def begin(self, record: TrialRecord) -> None:
        """Record that a trial begins; reports of an earlier attempt stay."""
        if record.number in self.records:
            record.reports = self.records[record.number].reports
        self.records[record.number] = record
        self._write(record, ("state", "name", "params", "arguments", "distributions"))

    def report(self, record: TrialRecord, step: int, value: float) -> None:
        """Record the objective of an evaluation during training."""
        record.reports[step] = value
        self._file.append(to_json({"trial": record.number, "reports": {step: value}}))

    def end(self, record: TrialRecord) -> None:
        """Record how a trial ended."""
        self._write(record, ("state", "params", "values", "distributions", "error"))

    def close(self) -> None:
        """Try a last time to write unwritten lines, and log the lost ones."""
        self._file.close()

    def _write(self, record: TrialRecord, names: Sequence[str]) -> None:
        self._file.append(to_json({"trial": record.number, **{name: getattr(record, name) for name in names}}))

    def _decoded(self, number: int, line: str) -> dict[str, Any]:
        try:
            entry = load_json(line)
            if isinstance(entry, dict) and ("search" in entry if number == 1 else type(entry.get("trial")) is int):
                return entry
        except ValueError:
            pass
        raise ValueError(f"line {number} of {self.path} is no entry of a search; restore it, or remove the file")


def _merged(entries: Sequence[dict[str, Any]]) -> dict[int, TrialRecord]:
    known = {item.name for item in fields(TrialRecord)}
    records: dict[int, TrialRecord] = {}
    for entry in entries:
        record = records.setdefault(entry["trial"], TrialRecord(entry["trial"]))
        for name in known & set(entry):
            value = entry[name]
            if name == "reports":
                record.reports.update({int(step): float(number) for step, number in value.items()})
            elif name == "values":
                record.values = [float(number) for number in value]
            else:
                setattr(record, name, _of_kind(name, value))
    return records


def _of_kind(name: str, value: Any) -> Any:
    """Return a value of a record's field.

    Raises:
        TypeError: the field is of another kind.
    """
    mappings = ("params", "arguments", "distributions")
    if not isinstance(value, dict if name in mappings else (str, type(None))) or (name == "state" and value is None):
        raise TypeError(f"{name} is a {type(value).__name__}")
    return value


def same_values(one: Any, other: Any) -> bool:
    """Whether two values are equal after writing and reading."""
    return json.loads(to_json(one)) == json.loads(to_json(other))
