"""Turn logged values into plain Python values."""

from __future__ import annotations

from typing import Any


def plain(item: Any) -> Any:
    """Return `item` as a Python number if it holds exactly one (a numpy scalar, a tensor), else as it is.

    A tensor on a device is read back to the host; the loop logs Python numbers, so only a user's own entry
    pays this.
    """
    if isinstance(item, bool | int | float | str) or item is None:
        # numpy's float64 is a float already, yet is printed by its own name.
        return float(item) if isinstance(item, float) else item
    read = getattr(item, "item", None)
    if callable(read):
        try:
            return read()
        except (TypeError, ValueError, RuntimeError):  # more than one element
            return item
    return item
