"""Scale losses for float16 with optimizers that free their gradients during the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler, OptState


class LossScaler(GradScaler):
    """torch's `GradScaler` for optimizers that leave no gradient to look at.

    torch's looks for overflows in `.grad`, and raises where there is none. This one takes the flag that the optimizer's
    hooks have found, `optimizer.found_inf`. Scale, growth, backoff and the saved state are torch's, and so is what it
    does with any other optimizer.

        scaler = LossScaler("cuda")
        scaler.backward(optimizer, loss)  # in place of scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    An optimizer that updates during the backward pass has left out by itself an update that overflowed, and `step`
    reads nothing back; of another one, `step` reads the flag, as torch's does.

    Args:
        device: type of the device that losses are on.
        options: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`, as torch's.
    """

    def __init__(self, device: str = "cuda", **options: Any) -> None:
        super().__init__(device, **options)
        self._one: torch.Tensor | None = None

    def backward(self, optimizer: Any, loss: torch.Tensor, *, last: bool = True) -> None:
        """Compute the gradients of a scaled loss, and have the optimizer consume them.

        Args:
            optimizer: one that consumes gradients in its own `backward`.
            loss: scalar, not scaled.
            last: whether it is the last micro-batch of its step.
        """
        if self._one is None or self._one.device != loss.device:
            self._one = torch.ones((), device=loss.device)
        scale = self.scale(self._one) if self.is_enabled() else None
        optimizer.backward(loss, last=last, scale=scale)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer's flag; its gradients were divided by the scale as they came."""
        if not _consumes(optimizer) or not self.is_enabled():
            super().unscale_(optimizer)
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        found = getattr(optimizer, "found_inf", None)
        if found is None:
            raise RuntimeError(
                f"{type(optimizer).__name__} has found nothing yet; call scaler.backward(optimizer, loss) first"
            )
        # A copy: update() adds up the flags of several optimizers in place.
        state["found_inf_per_device"] = {found.device: found.clone()}
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Apply what the backward passes have left, unless it overflowed."""
        if not _consumes(optimizer) or not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result = None
        if getattr(optimizer, "updates_in_backward", False):
            result = optimizer.step(*args, **kwargs)
        else:
            result = self._maybe_opt_step(optimizer, state, *args, **kwargs)  # sync: as torch's scaler
        state["stage"] = OptState.STEPPED
        return result


def _consumes(optimizer: torch.optim.Optimizer) -> bool:
    return bool(getattr(optimizer, "fused_in_backward", False))
