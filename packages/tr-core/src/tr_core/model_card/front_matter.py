"""Write the block of YAML at the top of a model card."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def front_matter(metadata: Mapping[str, Any]) -> str:
    """Return metadata as YAML between two lines of dashes, without entries that are empty or None.

    Args:
        metadata: text, numbers, lists and mappings of such.
    """
    lines = [line for key, value in metadata.items() if _says_something(value) for line in _entry(key, value)]
    return "\n".join(["---", *lines, "---", ""])


def _entry(key: str, value: Any) -> list[str]:
    name = key if key.replace("-", "").replace("_", "").isalnum() else _scalar(key)
    if isinstance(value, Mapping):
        return [f"{name}:", *(f"  {line}" for line in _mapping(value))]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [f"{name}:", *(line for item in value for line in _item(item))]
    return [f"{name}: {_scalar(value)}"]


def _mapping(values: Mapping[str, Any]) -> list[str]:
    return [line for key, value in values.items() if _says_something(value) for line in _entry(key, value)]


def _item(value: Any) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"- {_scalar(value)}"]
    first, *others = _mapping(value) or ["{}"]
    return [f"- {first}", *(f"  {line}" for line in others)]


def _scalar(value: Any) -> str:
    """Return text and numbers as JSON: YAML reads JSON, and never mistakes its text for another type."""
    if isinstance(value, bool | int):
        return json.dumps(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else json.dumps(str(value))
    text = json.dumps(str(value), ensure_ascii=False)
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    return f"\\u{ord(letter):04x}" if ord(letter) < 0x10000 else f"\\U{ord(letter):08x}"


def _says_something(value: Any) -> bool:
    return value is not None and (not isinstance(value, Sequence | Mapping) or len(value) > 0)
