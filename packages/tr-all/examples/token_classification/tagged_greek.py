"""Read the Greek New Testament with a part of speech for each word, which comes with the package py-sblgnt."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

REQUIREMENT = "py-sblgnt==0.10"

# By the number and name that begin a file's name. Whole books, since verses of one book resemble each other.
VALIDATION_BOOKS = ("69-Ga", "71-Php")  # Galatians, Philippians
TEST_BOOKS = ("79-Heb",)  # Hebrews: of an author who wrote no other book

NAMES = {
    "A-": "adjective",
    "C-": "conjunction",
    "D-": "adverb",
    "I-": "interjection",
    "N-": "noun",
    "P-": "preposition",
    "RA": "article",
    "RD": "demonstrative pronoun",
    "RI": "interrogative or indefinite pronoun",
    "RP": "personal pronoun",
    "RR": "relative pronoun",
    "V-": "verb",
    "X-": "particle",
}


class Verse(NamedTuple):
    """A verse.

    Attributes:
        words: without punctuation.
        tags: the part of speech of each, a key of `NAMES`.
    """

    words: list[str]
    tags: list[str]


def installed_folder() -> Path:
    """Return where the data is.

    Raises:
        SystemExit: its package is not installed.
    """
    try:
        return Path(str(distribution("py-sblgnt").locate_file("pysblgnt/sblgnt")))
    except PackageNotFoundError:
        raise SystemExit(f"error: the data is missing; run: python -m pip install --no-deps {REQUIREMENT}") from None


def read_book(path: Path) -> list[Verse]:
    """Read a file with a word a line: book, chapter and verse; part of speech; parsing; text; word; and more.

    Source: J. K. Tauber (ed.), MorphGNT: SBLGNT Edition, the columns of its README, with one more for the parsing.
    """
    verses: dict[str, Verse] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        place, tag, _, _, _, word, *_ = line.split()
        verse = verses.setdefault(place, Verse([], []))
        verse.words.append(word)
        verse.tags.append(tag)
    return list(verses.values())


def read_splits(folder: Path) -> dict[str, list[Verse]]:
    """Return the verses to train on, to validate with and to test with."""
    splits: dict[str, list[Verse]] = {"train": [], "validation": [], "test": []}
    for path in sorted(folder.glob("*-morphgnt.txt")):
        book = path.name.removesuffix("-morphgnt.txt")
        name = "validation" if book in VALIDATION_BOOKS else "test" if book in TEST_BOOKS else "train"
        splits[name] += read_book(path)
    return splits
