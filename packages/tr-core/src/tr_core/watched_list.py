"""A list that says when it was changed, whichever of its methods changed it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

_CHANGING = (
    "append",
    "clear",
    "extend",
    "insert",
    "pop",
    "remove",
    "reverse",
    "sort",
    "__delitem__",
    "__iadd__",
    "__imul__",
    "__setitem__",
)


class WatchedList(list[Any]):
    """A list that calls a function after every change.

    Args:
        items: what it holds at first.
        on_change: called without arguments.
    """

    def __init__(self, items: Iterable[Any], on_change: Callable[[], None]) -> None:
        super().__init__(items)
        self._on_change = on_change

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as items and function: a copy made item by item would call what it does not have yet."""
        return WatchedList, (list(self), self._on_change)


def _watched(name: str) -> Callable[..., Any]:
    usual = getattr(list, name)

    @wraps(usual)
    def change(self: WatchedList, *args: Any, **kwargs: Any) -> Any:
        answer = usual(self, *args, **kwargs)
        self._on_change()
        return answer

    return change


for _name in _CHANGING:
    setattr(WatchedList, _name, _watched(_name))
