"""Encode values as JSON that every reader accepts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tr_log.plain import plain


def encode(item: Any) -> str:
    """Return `item` as one line of strict JSON.

    Numbers that JSON cannot hold become the strings `"NaN"`, `"Infinity"` and `"-Infinity"`; single numbers
    of numpy or a tensor become numbers, and what JSON has no form for becomes its text.
    """
    return json.dumps(_strict(item), ensure_ascii=False, allow_nan=False)


def _strict(item: Any) -> Any:
    item = plain(item)
    if isinstance(item, float) and not math.isfinite(item):
        return "NaN" if math.isnan(item) else ("Infinity" if item > 0 else "-Infinity")
    if item is None or isinstance(item, bool | int | float | str):
        return item
    if isinstance(item, Mapping):
        return {str(key): _strict(inner) for key, inner in item.items()}
    if isinstance(item, list | tuple):
        return [_strict(inner) for inner in item]
    return str(item)
