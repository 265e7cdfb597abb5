"""Share what every strategy does alike on the device of its own process: compute, measure, apply, save, leave."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
from torch import nn

from tr_dist.mixed_precision import MixedPrecision


class OnDevice:
    """A device and the precision that is computed in there: the base of strategies, with others in the job or alone.

    Args:
        device: where this process computes.
        precision: `no`, `bf16`, or `fp16` with loss scaling.

    Attributes:
        device: where this process computes.

    Raises:
        ValueError: the precision is not known, or the device does not have it.
    """

    def __init__(self, device: torch.device, *, precision: str) -> None:
        self.device = device
        self._precision = MixedPrecision(precision, device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the module that was given to `prepare`."""
        return model

    def autocast(self) -> AbstractContextManager[object]:
        """Surround a forward pass and its loss: mixed precision, if it was asked for."""
        return self._precision.autocast()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a scalar loss, scaling it first under float16."""
        self._precision.backward(loss)

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the gradients. Returns False where a float16 overflow left the step out, else True.

        All ranks decide alike, for they hold the same averaged gradients. Only float16 reads from the device.

        Args:
            optimizer: what applies them.
            skip: scalar on the device, the same on all ranks; where it is not 0, parameters and optimizer state stay as
                they are. Optimizers other than torch's fused ones have it read from the device.
        """
        return self._precision.step(optimizer, skip=skip)

    def stateful(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
        """Return what a checkpoint holds, by name: `model` (unwrapped), `optimizer` if given, `scaler` under float16.

        Every rank holds the same, so one rank may save for all.
        """
        return self._parts(self.unwrap(model), optimizer)

    def whole_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the state dict of the unwrapped model, which every rank holds whole."""
        return self.unwrap(model).state_dict()

    def close(self, *, failed: bool = False) -> None:
        """Do nothing: no process group was joined."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(failed=kind is not None)

    def _parts(self, model: Any, optimizer: Any) -> dict[str, Any]:
        """Return the parts of a checkpoint, of which an optimizer may be None."""
        given = {"model": model, "optimizer": optimizer, "scaler": self._precision.scaler}
        return {name: part for name, part in given.items() if part is not None}

    def _clip(
        self, parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Scale whole gradients down to a total norm, unless it is None, and return the norm before."""
        self._precision.unscale(optimizer)
        norm = total_norm([p.grad for p in parameters if p.grad is not None], self.device)
        if max_norm is not None:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm


def total_norm(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the 2-norm of all numbers of gradients, a scalar tensor on `device`; zero if there are none."""
    if not gradients:
        return torch.zeros((), device=device)
    return nn.utils.get_total_norm(gradients).to(device)


def scale_to(gradients: list[torch.Tensor], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients whose total norm, with those of other ranks, is `norm`, so that it is at most `max_norm`."""
    if gradients:
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(gradients, coefficient.to(gradients[0].device))


def precision_of(args: Any) -> str:
    """Return the precision that training arguments ask for by `bf16` and `fp16`."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
