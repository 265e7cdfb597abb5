"""Save and restore callbacks that say what they have reached in a method `state`, as transformers' do."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tr_log import get_logger

logger = get_logger(__name__)


def exports_state(callback: Any) -> bool:
    """Whether a callback has the methods of an `ExportableState`: `state` and `from_state`."""
    return callable(getattr(callback, "state", None)) and callable(getattr(callback, "from_state", None))


class ExportedState:
    """What a callback's method `state` returns, as a part of a checkpoint: `args` and `attributes`.

    Restored attributes are set on the callback. Of the arguments of its constructor a restored run takes those that
    it was itself given otherwise than the saved run was; all others are those of the checkpoint, for some callbacks
    keep in them what they have reached.

    Args:
        callback: the callback, as it was given: its arguments are looked at here.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._given = self._read()["args"]

    def state_dict(self) -> dict[str, Any]:
        """Return the state, and the arguments that the callback was given."""
        return {**self._read(), "given": self._given}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Bring the callback to what was saved; of other programs' checkpoints there are the attributes alone."""
        callback, name = self._callback, type(self._callback).__name__
        if "given" not in state_dict:
            _set(callback, state_dict)
            return
        saved, then, own = state_dict["args"], state_dict["given"], self._given
        changed = {key for key in own if key in then and _differ(own[key], then[key])}
        for key in sorted(changed):
            logger.info("callback %s: %s: %r -> %r", name, key, then[key], own[key])
        wanted = {key: own[key] if key in changed else saved.get(key, own[key]) for key in own}
        if _differ(wanted, self._read()["args"]):
            # As the class itself makes one, for what it derives of its arguments; the object stays the user's own.
            vars(callback).update(vars(type(callback)(**copy.deepcopy(wanted))))
        _set(callback, state_dict["attributes"])

    def _read(self) -> dict[str, Any]:
        state, name = self._callback.state(), type(self._callback).__name__
        if not isinstance(state, Mapping) or not all(
            isinstance(state.get(part, {}), Mapping) for part in ("args", "attributes")
        ):
            raise TypeError(
                f"{name}.state() returned {state!r}; it must return a dict of two dicts: 'args', with what the class "
                "is called with, and 'attributes', with what is then set; or give the callback state_dict() and "
                "load_state_dict() in its place"
            )
        return {part: copy.deepcopy(dict(state.get(part, {}))) for part in ("args", "attributes")}


def _set(callback: Any, attributes: Mapping[str, Any]) -> None:
    for name, value in attributes.items():
        setattr(callback, name, value)


def _differ(one: Any, other: Any) -> bool:
    return bool(one != other)
