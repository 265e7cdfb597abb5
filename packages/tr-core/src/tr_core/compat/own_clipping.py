"""Clip the gradients by an override of the Trainer's `_clip_grad_norm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tr_core.protocols import Strategy


class OwnClipping:
    """A strategy whose gradients an override of `_clip_grad_norm` clips; all else is the strategy's."""

    def __init__(self, strategy: Strategy, clip: Callable[[nn.Module], Any]) -> None:
        self._strategy, self._clip = strategy, clip

    def clip_grad_norm(self, model: nn.Module, optimizer: Any, max_norm: float | None) -> torch.Tensor:
        """Call the override; `max_norm` is the arguments', which it reads itself."""
        return torch.as_tensor(self._clip(model), device=self._strategy.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._strategy, name)
