"""Raise the learning rate while evaluations improve, and lower it while they fail to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import SupportsFloat

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

LEAST_SHARE, GREATEST_SHARE = 0.01, 10.0
"""Default bounds, as shares of each parameter group's initial rate."""


class GreedyLR(ReduceLROnPlateau):
    """Divide the learning rate by `factor` after a row of improvements, multiply it after a row of failures.

    Step it with the result of each evaluation. An improvement is better than the best so far by more than `threshold`.
    An evaluation of the other kind, or a change of the rate, ends the row and begins a new one.

    Source: Subramanian, Krishnamoorthy, Murthy 2025, "Dynamic Learning Rate Scheduling based on Loss Changes Leads to
    Faster Convergence", arXiv:2512.14527, with the options of transformers 5. Deviations from those: the default bounds
    are shares of each group's own rate, not 1e-3 and 1.0, with which a rate below 1e-3 cannot fall. With `rel`, a share
    refers to the best result's absolute value, so that it means the same for negative results.

    Args:
        optimizer: its current rates are changed.
        mode: `min` if lower results are better, else `max`.
        factor: above 0 and below 1.
        patience: evaluations in a row that change nothing; the next one does.
        threshold: least improvement that counts: an amount, or with `rel` a share of the best.
        threshold_mode: `abs` or `rel`.
        cooldown: evaluations to skip after the rate was lowered.
        warmup: evaluations to skip after it was raised.
        min_lr: least rate, one number or one for each group; by default a hundredth of the group's first rate.
        max_lr: greatest rate, one number or one for each group; by default ten times the group's first rate.
        eps: only larger changes are applied.
        smooth: compare means over the last `window_size` results instead of single results.
        window_size: see `smooth`.
        reset_start: with all rates at their least, restart from the first rates after this many further failing rows.

    Raises:
        ValueError: a value is out of range, or the bounds leave a group's rate no room to change.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        mode: str = "min",
        factor: float = 0.95,
        patience: int = 10,
        threshold: float = 1e-6,
        *,
        threshold_mode: str = "abs",
        cooldown: int = 0,
        warmup: int = 0,
        min_lr: float | Sequence[float] | None = None,
        max_lr: float | Sequence[float] | None = None,
        eps: float = 1e-8,
        smooth: bool = False,
        window_size: int = 50,
        reset_start: int = 500,
    ) -> None:
        _check(mode, factor, threshold_mode, window_size)
        self.first_rates = [float(group["lr"]) for group in optimizer.param_groups]
        least = _bounds("min_lr", min_lr, LEAST_SHARE, self.first_rates)
        super().__init__(
            optimizer,
            mode="max" if mode == "max" else "min",
            factor=factor,
            patience=patience,
            threshold=threshold,
            threshold_mode="rel" if threshold_mode == "rel" else "abs",
            cooldown=cooldown,
            min_lr=least,
            eps=eps,
        )
        self.max_lrs = _bounds("max_lr", max_lr, GREATEST_SHARE, self.first_rates)
        self.warmup, self.smooth, self.window_size, self.reset_start = warmup, smooth, window_size, reset_start
        self._begin_anew()

    def step(self, metrics: SupportsFloat, epoch: int | None = None) -> None:  # type: ignore[override]
        """Count the result of an evaluation, and change the rates if a row is complete."""
        result = self._smoothed(float(metrics))
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        if self.cooldown_counter > 0 or self.warmup_counter > 0:
            if self.cooldown_counter > 0:
                self.cooldown_counter -= 1
            else:
                self.warmup_counter -= 1
            self.num_bad_epochs = self.num_good_epochs = 0
        else:
            self._count(result)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _count(self, result: float) -> None:
        if self._improves(result):
            self.best = result
            self.num_good_epochs, self.num_bad_epochs = self.num_good_epochs + 1, 0
        else:
            self.num_good_epochs, self.num_bad_epochs = 0, self.num_bad_epochs + 1
        if self.num_good_epochs > self.patience:
            self._set([min(rate / self.factor, most) for rate, most in zip(self._rates(), self.max_lrs, strict=True)])
            self.warmup_counter, self.num_good_epochs, self.rows_at_least = self.warmup, 0, 0
        elif self.num_bad_epochs > self.patience:
            self._set([max(rate * self.factor, least) for rate, least in zip(self._rates(), self.min_lrs, strict=True)])
            self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
            self._end_at_least()

    def _improves(self, result: float) -> bool:
        margin = abs(self.best) * self.threshold if self.threshold_mode == "rel" else self.threshold
        if math.isinf(self.best):
            margin = 0.0
        return result > self.best + margin if self.mode == "max" else result < self.best - margin

    def _end_at_least(self) -> None:
        """Restart once the rates have been at their least for long enough."""
        if any(rate > least for rate, least in zip(self._rates(), self.min_lrs, strict=True)):
            return
        self.rows_at_least += 1
        if self.rows_at_least >= self.reset_start:
            for group, rate in zip(self.optimizer.param_groups, self.first_rates, strict=True):
                _write(group, rate)
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.best = -math.inf if self.mode == "max" else math.inf
        self.num_bad_epochs = self.num_good_epochs = 0
        self.cooldown_counter = self.warmup_counter = self.rows_at_least = 0
        self.results: list[float] = []

    def _smoothed(self, result: float) -> float:
        if not self.smooth:
            return result
        self.results = [*self.results, result][-self.window_size :]
        return sum(self.results) / len(self.results)

    def _rates(self) -> list[float]:
        # sync: once an evaluation, where an optimizer keeps its rates on the device
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def _set(self, rates: list[float]) -> None:
        for group, old, new in zip(self.optimizer.param_groups, self._rates(), rates, strict=True):
            if abs(new - old) > self.eps:
                _write(group, new)


def _write(group: dict[str, object], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _check(mode: str, factor: float, threshold_mode: str, window_size: int) -> None:
    if mode not in ("min", "max"):
        raise ValueError(f"mode={mode!r} is not known; choose min, where lower results are better, or max")
    if not 0 < factor < 1:
        raise ValueError(f"factor={factor:g} must lie between 0 and 1: it lowers the rate, its inverse raises it")
    if threshold_mode not in ("rel", "abs"):
        raise ValueError(f"threshold_mode={threshold_mode!r} is not known; choose rel or abs")
    if window_size < 1:
        raise ValueError(f"window_size={window_size} must be at least 1")


def _bounds(name: str, given: float | Sequence[float] | None, share: float, rates: list[float]) -> list[float]:
    if given is None:
        return [rate * share for rate in rates]
    bounds = [float(bound) for bound in given] if isinstance(given, list | tuple) else [float(given)] * len(rates)  # type: ignore[arg-type]
    if len(bounds) != len(rates):
        count = len(rates)
        raise ValueError(f"{name}={given} has {len(bounds)} numbers for {count} parameter groups; give 1 or {count}")
    for bound, rate in zip(bounds, rates, strict=True):
        if bound > rate if name == "min_lr" else bound < rate:
            side = "above" if name == "min_lr" else "below"
            way = "lowered" if name == "min_lr" else "raised"
            raise ValueError(
                f"{name}={bound:g} is {side} the learning rate {rate:g} of a parameter group, which could never be "
                f"{way}; give another {name}, or leave it out for {share:g} of each group's own rate"
            )
    return bounds
