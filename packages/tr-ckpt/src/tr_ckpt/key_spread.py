"""Tell keys that can be made so that many of them have one hash, which makes a dict of them slow.

Python gives texts and bytes other hashes in each process; those of numbers and tuples are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from tr_ckpt.errors import CheckpointError

# Keys of one dict that have one hash: each is compared with all others.
MOST_ALIKE = 64

# An integer of less is its own hash.
_OWN_HASH_BELOW = 2**61 - 1


def may_collide(key: Any) -> bool:
    """Whether others with its hash can be made of it at will."""
    if type(key) is int:
        return abs(key) >= _OWN_HASH_BELOW
    return type(key) in (float, tuple)


def check(keys: Iterable[Any]) -> None:
    """Refuse the keys of one dict if many have one hash.

    Raises:
        CheckpointError: they do.
        TypeError: one cannot be a key.
    """
    counted = Counter(hash(key) for key in keys if may_collide(key))
    if counted and max(counted.values()) > MOST_ALIKE:
        raise CheckpointError(f"{max(counted.values()):,} of its keys have one hash: they are made to be slow")
