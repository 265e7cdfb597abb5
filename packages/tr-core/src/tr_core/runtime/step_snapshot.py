"""Save what a forward pass changes besides gradients, and restore it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from tr_core.random_state import RandomState


class ForwardState:
    """Random number generators and a model's buffers, as of the last call of `note`.

    No sync. A buffer that never changes is copied once; another is copied again if it was written to since. Running
    statistics are copied every time, because torch's writes to them are not detectable.

    Args:
        model: the unwrapped model.
        device: where it computes.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._generators: dict[str, Any] = {}
        self._noted: dict[int, _SavedBuffer] = {}
        self.record()

    def record(self) -> None:
        """Save the current state."""
        self._generators = RandomState(self._device).state_dict()
        noted: dict[int, _SavedBuffer] = {}
        for module in self._model.modules():
            for buffer in module._buffers.values():
                if buffer is None:
                    continue
                known = self._noted.get(id(buffer))
                if known is None or known.buffer is not buffer or known.may_differ():
                    silent = getattr(module, "running_mean", None) is not None
                    known = _SavedBuffer(buffer, buffer._version, buffer.detach().clone(), silent)
                noted[id(buffer)] = known
        self._noted = noted

    def restore(self) -> None:
        """Restore generators and buffers to the saved state."""
        RandomState(self._device).load_state_dict(self._generators)
        with torch.no_grad():
            for noted in self._noted.values():
                if noted.may_differ():
                    noted.buffer.copy_(noted.copy)


class _SavedBuffer(NamedTuple):
    buffer: torch.Tensor
    version: int
    copy: torch.Tensor
    is_silent: bool

    def may_differ(self) -> bool:
        return self.is_silent or self.buffer._version != self.version


@contextmanager
def restored_after(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Restore random number generators and buffers after the forward passes of a block."""
    state = ForwardState(model, device)
    try:
        yield
    finally:
        state.restore()
