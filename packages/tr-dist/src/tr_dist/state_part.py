"""Make a part of a checkpoint from two functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StatePart:
    """A part of a checkpoint whose state is another than that of the object which it belongs to.

    Attributes:
        state_dict: returns the state.
        load_state_dict: takes such a state.
    """

    state_dict: Callable[[], dict[str, Any]]
    load_state_dict: Callable[[dict[str, Any]], object]
