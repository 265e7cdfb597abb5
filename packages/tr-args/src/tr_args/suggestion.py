"""Guess what a misspelt name was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Shorter names are part of too many others to say anything.
LEAST_PART = 5
# Longer ones are no slips, and comparing letters takes the product of the lengths.
LONGEST = 200
MOST_GUESSED = 50  # unknown names for which the one that was meant is looked for: that takes a millisecond each


def closest(name: str, known: Iterable[str], *, cutoff: float = 0.7) -> str | None:
    """Return the name in `known` that `name` most resembles, or None if none comes near.

    Args:
        name: what was written.
        known: what could have been meant.
        cutoff: least similarity, from 0 (anything) to 1 (equal).
    """
    if len(name) > LONGEST:
        return None
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def did_you_mean(name: str, known: Iterable[str], *, also: Iterable[str] = (), prefix: str = "") -> str:
    """Return `; did you mean NAME?` for what `name` may have been meant to be, or an empty string.

    Args:
        name: what was written.
        known: what could have been meant; the nearest name, or up to three of which `name` is a part.
        also: what could have been meant too, if it is the nearest.
        prefix: put before the names.
    """
    known = list(known)
    match = closest(name, [*known, *also])
    containing = [other for other in known if len(name) >= LEAST_PART and f"_{name}_" in f"_{other}_"]
    names = [match] if match else containing if len(containing) <= 3 else []
    return f"; did you mean {' or '.join(prefix + other for other in names)}?" if names else ""
