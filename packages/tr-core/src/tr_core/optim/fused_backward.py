"""Train with an optimizer that consumes gradients during the backward pass.

The optimizer then does a strategy's work with gradients. A wrapper replaces the strategy during such a run, and the
loop is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, cast

import torch
from torch import nn

from tr_core.model_io import to_device
from tr_core.protocols import InBackward, Strategy

Kind = Literal["step", "backward", "backward-update"]


def kind(optimizer: torch.optim.Optimizer) -> Kind:
    """Return when an optimizer uses gradients: in `step`, in the backward pass, or there with an update."""
    if not getattr(optimizer, "fused_in_backward", False):
        return "step"
    return "backward-update" if getattr(optimizer, "updates_in_backward", True) else "backward"


def skips_nonfinite(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer itself skips a step whose loss or gradient norm is not finite on any rank."""
    return getattr(optimizer, "leaves_out_nonfinite", False)


class FusedBackwardStrategy:
    """A strategy that leaves backward, clipping and step to an optimizer that consumes gradients.

    It delegates everything else to the strategy.
    """

    def __init__(self, strategy: Strategy, optimizer: torch.optim.Optimizer, model: nn.Module, log: Any) -> None:
        self._strategy, self._log = strategy, log
        self._optimizer = cast("InBackward", optimizer)
        self._scaler = cast("Any", strategy.state_parts(model, None).get("scaler"))
        self._flag = _OverflowFlag(self._optimizer, strategy.device)
        self._is_last = True

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the strategy."""
        return getattr(self._strategy, name)

    def accumulate(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[object]:
        """Surround one micro-batch; the optimizer averages the gradients."""
        self._is_last = sync
        return self._strategy.accumulate_fused(model, last=sync)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute and consume the gradients in the optimizer."""
        scale = None if self._scaler is None else self._scaler.scale(self._flag.one)
        self._optimizer.backward(loss, last=self._is_last, scale=scale)

    def clip_grad_norm(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None
    ) -> torch.Tensor:
        """Return the optimizer's gradient norm, and scale its kept gradients down to `max_norm`."""
        norm = to_device(self._optimizer.clip_grad_norm(max_norm), self._strategy.device)
        self._flag.record(norm)
        if self._log is not None and self._optimizer.norm_is_estimated:
            self._log(
                "grad_norm is an estimate, and so is what max_grad_norm clips by: the whole gradient is never there at "
                "once where micro-batches are accumulated, or ranks exchange projections only"
            )
            self._log = None
        return norm

    def step(self, optimizer: torch.optim.Optimizer, *, skip: torch.Tensor | None = None) -> bool:
        """Apply the update; with float16, skip one that overflowed."""
        if skips_nonfinite(optimizer):
            skip = None  # skipped already, by the same rule; a strategy would have to read the flag
        if self._scaler is None:
            return self._strategy.step(optimizer, skip=skip)
        return self._strategy.step(cast("torch.optim.Optimizer", self._flag), skip=skip)


@contextmanager
def fused_backward(
    strategy: Strategy, optimizer: torch.optim.Optimizer, model: nn.Module, max_norm: float | None, log: Any
) -> Iterator[Strategy]:
    """Return the strategy to train with: a wrapper, if the optimizer consumes gradients."""
    if kind(optimizer) == "step":
        yield strategy
        return
    consuming = cast("InBackward", optimizer)
    consuming.bind(strategy)
    if kind(optimizer) == "backward-update":
        cast("Any", consuming).clip_to(max_norm)
    try:
        yield cast("Strategy", FusedBackwardStrategy(strategy, optimizer, model, log))
    finally:
        consuming.detach()
        consuming.zero_grad()


def check_fused_backward(
    optimizer: torch.optim.Optimizer, strategy: Strategy, name: str | None, *, syncs_each_batch: bool
) -> None:
    """Raise if an optimizer that consumes gradients in the backward pass lacks a requested feature."""
    if kind(optimizer) == "step":
        return
    name = type(optimizer).__name__ if name is None else f"optim={name!r}"
    if not isinstance(optimizer, InBackward):
        missing = sorted(
            member
            for member in ("bind", "backward", "clip_grad_norm", "detach", "reduces_own_gradients", "norm_is_estimated")
            if not hasattr(optimizer, member)
        )
        raise ValueError(
            f"{name} says that it consumes gradients in the backward pass (fused_in_backward), but has no "
            f"{', '.join(missing)}; tr_core.protocols.InBackward says what it needs"
        )
    if strategy.schedules_micro_batches:
        raise ValueError(
            f"{name} consumes gradients in the backward pass, and with pp_size a schedule runs the backward passes; "
            "choose another optim, such as adamw_torch"
        )
    if syncs_each_batch:
        raise ValueError(
            f"sync_each_batch=True cannot be used with {name}, which exchanges its gradients once a step; leave it out "
            "of accelerator_config"
        )
    if strategy.world_size > 1 and not optimizer.reduces_own_gradients:
        raise ValueError(
            f"{name} does not average gradients over ranks, and they are consumed before {type(strategy).__name__} "
            "could; train on one process, or use another optimizer"
        )


class _OverflowFlag:
    """Poses as an optimizer for a loss scaler: one number, with an infinite gradient where the norm was infinite.

    The scaler looks for overflows in `.grad`, but the optimizer has emptied it.
    """

    def __init__(self, optimizer: InBackward, device: torch.device) -> None:
        self.one = torch.ones((), device=device)
        self._parameter = nn.Parameter(torch.zeros((), device=device))
        self._optimizer = optimizer
        self.param_groups = [{"params": [self._parameter]}]

    def record(self, norm: torch.Tensor) -> None:
        self._parameter.grad = torch.where(norm.isfinite(), 0.0, torch.inf)

    def step(self) -> Any:
        return self._optimizer.step()
