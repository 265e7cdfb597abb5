"""Name the tensor in which a file was cut or changed.

While a file is written, the SHA-256 of all that came so far is noted at the end of each tensor: the digest of the
whole file passes through these values anyway, so they cost nothing. The first of them that is another tells where the
file was changed; what lies behind that place cannot be told from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tr_ckpt import reads

# Enough to find a place by: whether a file is whole is decided by its full digest.
DIGITS = 16

HEADER = ""  # no tensor has this name

_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Section:
    """A stretch of a file: its header, or one tensor.

    Attributes:
        name: of the tensor; `HEADER` for what comes before the first.
        end: where it ends, in bytes from the beginning of the file.
        digest: first digits of the SHA-256 of the file up to there.
    """

    name: str
    end: int
    digest: str


def describe(sections: Iterable[Section]) -> dict[str, str]:
    """Return sections as a manifest holds them, one line each: where it ends, and the digest up to there."""
    return {section.name: f"{section.end} {section.digest}" for section in sections}


def parse(described: Mapping[str, str]) -> tuple[Section, ...]:
    """Return the sections that `describe` was given, in the order of the file.

    Raises:
        ValueError, AttributeError: they are none.
    """
    found = []
    for name, text in described.items():
        end, digest = text.split(" ")
        found.append(Section(name, int(end), digest))
    return tuple(sorted(found, key=lambda section: section.end))


def where_cut(sections: Iterable[Section], size: int) -> str:
    """Return where a file that is `size` bytes long, and should be longer, was cut; empty if that is not known."""
    start = 0
    for section in sections:
        if section.end > size:
            return f": cut in {_name(section, start)}"
        start = section.end
    return ""


def where_changed(path: Path, sections: Iterable[Section]) -> str:
    """Return where a file of the right length was changed first; empty if that is not known. Reads the file.

    Raises:
        OSError: there is no such file.
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
