"""Skip a step, or raise, if its loss or gradient norm is NaN or infinite.

The decision is made on the device, and identically on all ranks. With `on_nonfinite="log"` nothing here is used: the
loop applies every update, and counts. For the other two values `Updates` asks a guard.

A flag on the device skips an update. `tr_dist/base.py` has the same code on purpose, because neither package
imports the other. The flag is an argument of `Strategy.step`: with float16 a strategy updates its scaler even if it
skips the update.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, cast

import torch
from torch import nn

from tr_core.log_window import LogWindow, is_nonfinite
from tr_core.metric_means import read_scalars
from tr_core.model_io import local_shard, to_device
from tr_core.optim.fused_backward import kind, skips_nonfinite
from tr_core.protocols import Strategy
from tr_core.signatures import names_argument, takes_argument

_NAMES_SHOWN = 5


class NonfiniteGuard(Protocol):
    """Decides about updates that are not finite."""

    def look_at_gradients(self) -> None:
        """Look at the gradients of a step before they are clipped. No sync."""
        ...

    def leaves_out(self) -> torch.Tensor | None:
        """Return on the device whether the current update is left out; None applies it in any case. No sync."""
        ...

    def check(self) -> None:
        """Raise `FloatingPointError` if the run must stop. Sync: once. Every rank calls it."""
        ...


class SkipNonfinite:
    """Skips every update whose loss, on any rank, or gradient norm is not finite.

    Parameters and the optimizer's state do not change. The schedule and `global_step` advance, because only the device
    knows whether an update was applied. The window's loss, and the parts of it from `compute_loss`, cover only the
    applied steps.

    Raises:
        ValueError: the strategy or the optimizer cannot skip an update.
    """

    def __init__(self, strategy: Strategy, window: LogWindow, optimizer: torch.optim.Optimizer) -> None:
        if kind(optimizer) == "backward-update" and not skips_nonfinite(optimizer):
            raise ValueError(
                f"on_nonfinite='skip' cannot leave out an update of {type(optimizer).__name__}: it is made during the "
                "backward, before loss and norm are known; use on_nonfinite='raise', or another optimizer"
            )
        if not takes_argument(strategy.step, "skip"):
            raise ValueError(
                f"on_nonfinite='skip' needs a strategy whose step(optimizer, skip=...) can leave out an update; that "
                f"of {type(strategy).__name__} cannot. Use on_nonfinite='raise', or another strategy"
            )
        self._strategy, self._window = strategy, window
        window.means.holds_back = True
        # torch's schedules warn if the first of all updates was skipped; here that is intended.
        vars(optimizer)["_opt_called"] = True

    def look_at_gradients(self) -> None:
        """Do nothing: the norm shows a gradient that is not finite."""

    def leaves_out(self) -> torch.Tensor:
        """Return whether loss or norm are not finite on any rank, and take the step out of the window then."""
        window = self._window
        skip = on_any_rank(is_nonfinite(window.step_loss, cast("torch.Tensor", window.grad_norm)), self._strategy)
        window.discard_step(skip)
        return skip

    def check(self) -> None:
        """Do nothing: non-finite updates were skipped."""


class RaiseNonfinite:
    """Records the first step whose loss or gradient norm is not finite, and raises at the next boundary.

    No sync in a step. If the optimizer can skip an update on the device (see `skips_on_device`), the first such update
    and all later ones are skipped. The weights are then those of the last good step.
    """

    def __init__(
        self, strategy: Strategy, window: LogWindow, optimizer: torch.optim.Optimizer, model: nn.Module
    ) -> None:
        self._strategy, self._window, self._optimizer = strategy, window, optimizer
        self._named = [(name, p) for name, p in strategy.unwrap(model).named_parameters() if p.requires_grad]
        # A scaler routinely skips overflowed updates, so with one only the loss is checked.
        self._has_scaler = "scaler" in strategy.state_parts(model, optimizer)
        can_skip = self._has_scaler or skips_on_device(optimizer)
        self.protects_weights = can_skip and takes_argument(strategy.step, "skip")
        device = strategy.device
        self._step = torch.zeros((), dtype=torch.int64, device=device)  # the first bad one; 0 for none
        self._loss = self._norm = self._none = torch.zeros((), device=device)
        self._is_divided = any(p.device != self._none.device for _, p in self._named)  # over devices
        self._bad_gradients = self._bad_now = torch.zeros(len(self._named), dtype=torch.bool, device=device)

    def look_at_gradients(self) -> None:
        """Note which gradients are not finite: clipping by a norm that is NaN makes all of them NaN."""
        gradients = [self._none if p.grad is None else local_shard(p.grad) for _, p in self._named]
        norms = torch._foreach_norm(gradients)
        if self._is_divided:
            norms = to_device(norms, self._none.device)
        self._bad_now = ~torch.stack(norms).isfinite()

    def leaves_out(self) -> torch.Tensor | None:
        """Note the first step that is not finite; return whether there was one, if the optimizer can skip updates."""
        window = self._window
        loss, norm = window.step_loss, cast("torch.Tensor", window.grad_norm)
        bad = on_any_rank(is_nonfinite(loss, loss if self._has_scaler else norm), self._strategy)
        is_first = bad & (self._step == 0)
        self._step = torch.where(is_first, window.step + 1, self._step)
        self._loss = torch.where(is_first, loss, self._loss)
        self._norm = torch.where(is_first, norm, self._norm)
        self._bad_gradients = torch.where(is_first, self._bad_now, self._bad_gradients)
        if self.protects_weights:
            window.left_out = self._step > 0
        return window.left_out if self.protects_weights else None

    def check(self) -> None:
        """Raise if a step was not finite."""
        step, loss, norm = read_scalars([self._step, self._loss, self._norm])
        if step > 0:
            raise FloatingPointError(self._describe(int(step), loss, norm))

    def _describe(self, step: int, loss: float, norm: float) -> str:
        losses = self._strategy.gather_objects(loss)
        shown = f"{loss:g}" if len(losses) == 1 else ", ".join(f"{each:g} on rank {n}" for n, each in enumerate(losses))
        bad = self._bad_gradients.tolist()  # sync: the run ends here
        names = [name for (name, _), is_bad in zip(self._named, bad, strict=True) if is_bad]
        more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
        where = ", ".join(names[:_NAMES_SHOWN]) + more if names else "none of the parameters that hold one"
        weights = (
            f"This update and those after it were left out: the weights are those of step {step - 1}"
            if self.protects_weights
            else f"{type(self._optimizer).__name__} cannot leave out an update without waiting for the device in "
            "every step, so this one and those after it were applied, and the weights may be lost"
        )
        return (
            f"step {step}: the loss is {shown}, the gradient norm {norm:g}; gradients that are not finite: {where}. "
            f"{weights}; no checkpoint was saved since. Continue from the last one with a lower learning_rate, a lower "
            "max_grad_norm or a longer warmup, or with on_nonfinite='skip' to leave such updates out; to find the "
            "operation it begins with, train under torch.autograd.set_detect_anomaly(True)"
        )


def choose_guard(
    on_nonfinite: str, strategy: Strategy, window: LogWindow, optimizer: torch.optim.Optimizer, model: nn.Module
) -> NonfiniteGuard | None:
    """Return the guard that `on_nonfinite` requires; None for `log`."""
    if on_nonfinite == "skip":
        return SkipNonfinite(strategy, window, optimizer)
    return RaiseNonfinite(strategy, window, optimizer, model) if on_nonfinite == "raise" else None


def on_any_rank(flag: torch.Tensor, strategy: Strategy) -> torch.Tensor:
    """Return on every rank whether a flag is set on any rank; the result stays on the device."""
    return flag if strategy.world_size == 1 else strategy.sum(flag.to(torch.int32)) > 0


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer skips an update by a flag on the device: torch's fused ones, by `found_inf`.

    SGD with momentum does not: a skipped first update leaves uninitialised memory in its buffer. The mps device does
    not: some versions of torch apply updates that should be skipped.
    """
    if not getattr(optimizer, "_step_supports_amp_scaling", False) or _takes_scaler(type(optimizer)):
        return False
    groups = optimizer.param_groups
    return not any(group.get("momentum") or any(p.is_mps for p in group["params"][:1]) for group in groups)


def step_unless(skip: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Apply an update unless a flag is set; if set, parameters and state do not change by a bit.

    Sync only if the optimizer cannot skip by itself (see `skips_on_device`).
    """
    if skips_on_device(optimizer):
        vars(optimizer).update(grad_scale=None, found_inf=skip.to(torch.float32))
        try:
            optimizer.step()
        finally:
            del vars(optimizer)["grad_scale"], vars(optimizer)["found_inf"]
    elif not skip.item():  # sync: every step, with an optimizer that cannot skip an update by itself
        optimizer.step()


@cache
def _takes_scaler(kind: type[Any]) -> bool:
    # An older protocol, in which an optimizer queries the scaler itself.
    return names_argument(kind.step, "grad_scaler")
