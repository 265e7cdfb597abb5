"""Clip and apply the gradients of each step of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tr_core.optim.nonfinite import NonfiniteGuard
from tr_core.protocols import Strategy


class Updates:
    """The update of each step: the guard looks at the gradients, they are clipped, and the strategy applies them.

    Attributes:
        strategy: clips and applies gradients.
        guard: leaves out updates that are not finite, or ends the run at one; None applies every update.
        own_clip: an override of the Trainer's `_clip_grad_norm`, which clips in place of the strategy, or None.
        captured_norm: the gradient norm of an update that a captured step has applied already; None for any other step.
    """

    def __init__(self, strategy: Strategy, optimizer: torch.optim.Optimizer, guard: NonfiniteGuard | None) -> None:
        self.strategy, self._optimizer, self.guard = strategy, optimizer, guard
        self.own_clip: Callable[[nn.Module], Any] | None = None
        self.captured_norm: torch.Tensor | None = None

    def clip_grad_norm(self, model: nn.Module, max_norm: float | None) -> torch.Tensor:
        """Clip the gradients to `max_norm`, unless it is None; return their norm before that, on the device."""
        if self.captured_norm is not None:
            return self.captured_norm
        if self.guard is not None:
            self.guard.look_at_gradients()
        if self.own_clip is not None:  # it reads the limit from the arguments
            return torch.as_tensor(self.own_clip(model), device=self.strategy.device)
        return self.strategy.clip_grad_norm(model, self._optimizer, max_norm)

    def step(self) -> bool:
        """Apply the update; return what the strategy does. The window holds the step's loss, gradient norm and number.

        No sync beyond the optimizer's own.
        """
        if self.captured_norm is not None:
            self.captured_norm = None
            return True
        skip = None if self.guard is None else self.guard.leaves_out()
        if skip is None:
            return self.strategy.step(self._optimizer)
        return self.strategy.step(self._optimizer, skip=skip)

    def check(self) -> None:
        """Raise `FloatingPointError` if an update was not finite and the run must end. Sync: once. Collective."""
        if self.guard is not None:
            self.guard.check()
