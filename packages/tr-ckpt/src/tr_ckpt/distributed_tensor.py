"""Recognise DTensors without importing their module."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from tr_ckpt.errors import CheckpointError


def may_exist() -> bool:
    """Whether this process can hold a DTensor: none exists unless their module was imported."""
    return "torch.distributed.tensor" in sys.modules


def is_distributed(value: Any) -> bool:
    """Whether `value` is a DTensor."""
    return may_exist() and isinstance(value, sys.modules["torch.distributed.tensor"].DTensor)


def find(state: Any, steps: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the DTensors in a nested state, each with its dotted path."""
    if is_distributed(state):
        yield ".".join(steps), state
    elif isinstance(state, Mapping):
        for key, value in state.items():
            yield from find(value, (*steps, str(key)))
    elif isinstance(state, list | tuple):
        for number, value in enumerate(state):
            yield from find(value, (*steps, str(number)))


def unsupported(tensor: Any) -> str:
    """Return why the layout of a DTensor cannot be saved, and what to do; empty if it can."""
    partial = [placement for placement in tensor.placements if placement.is_partial()]
    if partial:
        return (
            f"a DTensor with the placement {partial[0]!r}: no rank has its numbers yet; "
            "give tensor.redistribute(placements=[Replicate(), ...]) in state_dict()"
        )
    return ""


def layout_identity(tensor: Any) -> Hashable:
    """Return a key that is equal for two DTensors over the same local memory only if they are the same tensor."""
    return id(tensor.device_mesh), tensor.placements, tuple(tensor.shape)


def require() -> None:
    """Refuse a build of torch that cannot read and write shards.

    Raises:
        CheckpointError: torch has no distributed package.
    """
    import torch.distributed

    if not torch.distributed.is_available():
        raise CheckpointError(
            "state in shards needs torch.distributed, which this build of torch lacks; install one that has it"
        )
