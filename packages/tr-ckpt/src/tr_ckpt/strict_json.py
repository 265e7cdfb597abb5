"""Read JSON as the standard defines it: no NaN, no Infinity, no name twice in an object."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tr_ckpt import reads
from tr_ckpt.errors import CheckpointError

# Of a file. What it becomes in memory is up to 30 times as large.
MOST_BYTES = 2**30


def read(path: Path, *, is_lax: bool = False) -> Any:
    """Return the value that a file holds.

    Args:
        path: of the file.
        is_lax: whether it may hold what JSON does not have and Python writes: NaN, infinities, a name twice.

    Raises:
        OSError: there is no such file.
        UnreadableError: it cannot be read.
        CheckpointError: it is no JSON, or larger than anything that is read.
    """
    raw = reads.content(path, MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise CheckpointError(f"it has more than {MOST_BYTES:,} bytes, and that much JSON is not read")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(str(error)) from error
    return loads(text, is_lax=is_lax)


def loads(text: str, *, is_lax: bool = False) -> Any:
    """Return the value that `text` holds.

    Raises:
        CheckpointError: it is not strict JSON; with `is_lax`, nor such as Python writes.
    """
    try:
        if is_lax:
            return json.loads(text)
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
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # add returns None
        raise CheckpointError(f"the name {twice!r:.80} occurs twice in one object")
    return found
