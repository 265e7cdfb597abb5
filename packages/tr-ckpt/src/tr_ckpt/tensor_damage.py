"""Name the tensor in which a file was cut or changed.

While a file is written, the SHA-256 so far is recorded at the end of each tensor. The digest of the
whole file passes through these values anyway, so they cost nothing. The first one that differs shows where the
file was changed. Changes after that position cannot be located.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import reads

# Enough to locate damage: the full digest decides whether a file is intact.
DIGITS = 16

HEADER = ""  # no tensor has this name

_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Section:
    """A range of a file: its header, or one tensor.

    Attributes:
        name: of the tensor; `HEADER` for the bytes before the first.
        end: its end, in bytes from the beginning of the file.
        digest: first digits of the SHA-256 of the file up to that position.
    """

    name: str
    end: int
    digest: str


def describe(sections: Iterable[Section]) -> dict[str, str]:
    """Return sections in the form of a manifest: for each name, its end and the digest up to there."""
    return {section.name: f"{section.end} {section.digest}" for section in sections}


def parse(described: Mapping[str, str]) -> tuple[Section, ...]:
    """Parse the result of `describe`; return the sections in the order of the file.

    Raises:
        ValueError, AttributeError: it is malformed.
    """
    found = []
    for name, text in described.items():
        end, digest = text.split(" ")
        found.append(Section(name, int(end), digest))
    return tuple(sorted(found, key=lambda section: section.end))


def where_cut(sections: Iterable[Section], size: int) -> str:
    """Return where a file of `size` bytes, which should be longer, was cut; empty if unknown."""
    start = 0
    for section in sections:
        if section.end > size:
            return f": cut in {_name(section, start)}"
        start = section.end
    return ""


def where_changed(path: Path, sections: Iterable[Section]) -> str:
    """Return where a file of the right length was changed first; empty if unknown. Reads the file.

    Raises:
        OSError: the file does not exist.
        UnreadableError: it cannot be read.
    """
    digest, start = hashlib.sha256(), 0
    with reads.CheckpointFile(path) as file:
        for section in sections:
            left = section.end - start
            while left > 0 and (block := file.read(min(left, _BLOCK_BYTES))):
                digest.update(block)
                left -= len(block)
            if not digest.hexdigest().startswith(section.digest):
                return f", first in {_name(section, start)}"
            start = section.end
    return ""


def _name(section: Section, start: int) -> str:
    what = "its header" if section.name == HEADER else f"tensor {section.name}"
    return f"{what} (bytes {start:,} to {section.end:,})"
