"""Read texts with labels from CSV, TSV and JSON Lines files."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from input_error import InputError


@dataclass(frozen=True)
class Sample:
    """One text to classify.

    Attributes:
        text: the text.
        pair: a second text that belongs to it, in tasks on pairs.
        label: name of its class; None where it is not known.
    """

    text: str
    pair: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Columns:
    """The columns of a file that are read.

    Attributes:
        text: column of the text.
        pair: column of the second text; None if there is none.
        label: column of the label.
    """

    text: str = "text"
    pair: str | None = None
    label: str = "label"


def read_samples(path: str | Path, columns: Columns, *, labels_required: bool = True) -> list[Sample]:
    """Read a file with a header line (`.csv`, `.tsv`) or one JSON object a line (`.jsonl`, `.json`), in UTF-8.

    Args:
        path: the file.
        columns: which columns are read.
        labels_required: refuse a file without labels; else its samples have none.

    Raises:
        InputError: the file is missing or empty, of another kind, damaged, or lacks a column or value.
    """
    path = Path(path).expanduser()
    read = _READERS.get(path.suffix.lower())
    if read is None:
        raise InputError(
            f"{path}: cannot read files that end in {path.suffix!r}; give one that ends in {', '.join(_READERS)}"
        )
    try:
        rows = list(read(path))
    except FileNotFoundError as error:
        raise InputError(f"{path}: there is no such file{_neighbours(path)}") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    if not rows:
        raise InputError(f"{path}: holds no sample; it needs at least one line of data")
    with_labels = labels_required or any(columns.label in row for _, row in rows)
    return [_sample(row, columns, with_labels, f"{path}, line {line}") for line, row in rows]


def label_names(samples: Iterable[Sample]) -> list[str]:
    """Return the labels that occur, sorted: as numbers if all are whole numbers, else as text."""
    names = {sample.label for sample in samples if sample.label is not None}
    if all(name.lstrip("-").isdecimal() for name in names):
        return sorted(names, key=int)
    return sorted(names)


def label_ids(samples: Sequence[Sample], names: Sequence[str], source: str) -> list[int]:
    """Return the place of each sample's label in `names`.

    Args:
        samples: they all have a label.
        names: the labels that the model knows.
        source: where the samples come from, for the message.

    Raises:
        InputError: a label is not among `names`.
    """
    numbers = {name: number for number, name in enumerate(names)}
    unknown = sorted({sample.label or "" for sample in samples} - numbers.keys())
    if unknown:
        count = sum(sample.label in unknown for sample in samples)
        raise InputError(
            f"{source}: {count} of {len(samples)} samples have labels that the model does not know: "
            f"{_listed(unknown)}; it knows {_listed(names)}. Correct them, or train with data that has them"
        )
    return [numbers[sample.label or ""] for sample in samples]


def _sample(row: Mapping[str, Any], columns: Columns, with_labels: bool, place: str) -> Sample:
    wanted = [
        ("text", columns.text),
        *([("text_pair", columns.pair)] if columns.pair else []),
        *([("label", columns.label)] if with_labels else []),
    ]
    for role, name in wanted:
        if name not in row:
            raise InputError(
                f"{place}: there is no column {name!r}; there are {_listed(sorted(row))}; name the right one with "
                f"--{role}_column"
            )
        if row[name] is None or (role == "label" and row[name] == ""):
            raise InputError(f"{place}: column {name!r} has no value; fill it in, or take the line out")
    pair = str(row[columns.pair]) if columns.pair else None
    return Sample(str(row[columns.text]), pair, str(row[columns.label]) if with_labels else None)


def _read_csv(path: Path, delimiter: str = ",") -> Iterator[tuple[int, dict[str, Any]]]:
    csv.field_size_limit(2**30)  # texts are longer than the 128 kB that the module stops at
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter)
        for row in reader:
            if None in row:
                raise InputError(
                    f"{path}, line {reader.line_num}: has {len(row) - 1 + len(row[None])} values under "
                    f"{len(row) - 1} column names; put values that contain {delimiter!r} between double quotes"
                )
            yield reader.line_num, row


def _read_tsv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    return _read_csv(path, delimiter="\t")


def _read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number}: is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise InputError(
                    f"{path}, line {number}: holds a {type(row).__name__}; every line must be one JSON object, as in "
                    '{"text": "...", "label": "..."}'
                )
            yield number, row


_READERS = {".csv": _read_csv, ".tsv": _read_tsv, ".jsonl": _read_json_lines, ".json": _read_json_lines}


def _neighbours(path: Path) -> str:
    if not path.parent.is_dir():
        return f", and no folder {path.parent}"
    names = sorted(each.name for each in path.parent.iterdir() if each.suffix.lower() in _READERS)
    return f"; {path.parent} holds {_listed(names)}" if names else f"; {path.parent} holds no such files"


def _listed(names: Sequence[str], limit: int = 10) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(repr, names[:limit])) + more
