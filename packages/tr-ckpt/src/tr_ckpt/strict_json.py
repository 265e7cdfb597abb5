"""Read JSON as the standard defines it: no NaN, no Infinity, no name twice in an object."""

from __future__ import annotations

import json
from typing import Any

from tr_ckpt.errors import CheckpointError


def loads(text: str) -> Any:
    """Return the value that `text` holds.

    Raises:
        CheckpointError: it is not strict JSON.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:  # a number of more than 4300 digits is a plain ValueError
        raise CheckpointError(str(error)) from error


def _refuse_constant(constant: str) -> None:
    raise CheckpointError(f"{constant} is no JSON value")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"the name {twice!r} occurs twice in one object")
    return found
