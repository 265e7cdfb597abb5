"""Let an override of a loading method decide what a resume loads, as under transformers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map

from tr_core.protocols import Stateful


class OwnLoading:
    """Move parts between their states before a resume and those of the checkpoint.

    Args:
        parts: what it loads, before the resume.
        can_put_back: whether the strategy lets these parts be loaded by `load_state_dict`.
    """

    def __init__(self, method: str, parts: Mapping[str, Stateful], *, can_put_back: bool) -> None:
        self._method, self._parts, self._can_put_back = method, dict(parts), can_put_back
        self._before = _copied(self._parts) if can_put_back else {}
        self._restored: dict[str, Any] = {}
        self._is_loaded = False

    def put_back(self) -> None:
        """Keep the states that the resume restored, and load those of before it."""
        if self._can_put_back:
            self._restored = _copied(self._parts)
            self._load(self._before)

    def load(self) -> None:
        """Load the states of the checkpoint."""
        self._load(self._restored)
        self._is_loaded = True

    def check(self) -> None:
        """Raise if the override did not load the checkpoint's states, and they could not be put back before it."""
        if not self._can_put_back and not self._is_loaded:
            raise RuntimeError(
                f"the override of {self._method} did not call super(), but this strategy restores "
                f"{' and '.join(self._parts)} in any case; call super().{self._method}(...) in it and load more after "
                "that, or begin with the weights alone: load them into the model, and train without "
                "resume_from_checkpoint"
            )

    def _load(self, states: Mapping[str, Any]) -> None:
        for name, state in states.items():
            self._parts[name].load_state_dict(state)


def _copied(parts: Mapping[str, Stateful]) -> dict[str, Any]:
    return {name: tree_map(_copy, dict(part.state_dict())) for name, part in parts.items()}


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return copy.deepcopy(leaf)
    is_shard = hasattr(leaf, "device_mesh")  # it is loaded from its own device only
    return leaf.detach().clone() if is_shard else leaf.detach().to("cpu", copy=True)
