"""Leave an optimizer as it was where a group that is added to it is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Add = TypeVar("Add", bound=Callable[..., None])


def whole_or_not(add: Add) -> Add:
    """Return an `add_param_group` that takes back a group which it raises about.

    Checks need the group with all its options, as torch makes it when it adds it.
    """

    @wraps(add)
    def add_or_take_back(self: Any, param_group: dict[str, Any]) -> None:
        before = len(self.param_groups)
        try:
            add(self, param_group)
        except BaseException:
            del self.param_groups[before:]
            raise

    return cast("Add", add_or_take_back)
