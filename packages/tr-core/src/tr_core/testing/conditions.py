"""Bring a run into conditions that a test machine does not have: another clock, a loss scaler on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tr_core.callbacks.wall_time import WallTimeCallback
from tr_core.single_device import SingleDevice


def set_clock(callbacks: list[Any], clock: Callable[[], float]) -> None:
    """Let intervals of wall time and `max_time` count by another clock.

    Args:
        callbacks: those of the run, `trainer.callback_handler.callbacks`.
        clock: returns seconds, never fewer than before.
    """
    for callback in callbacks:
        if isinstance(callback, WallTimeCallback):
            callback._clock = clock


def set_loss_scaler(strategy: SingleDevice, scaler: torch.amp.GradScaler) -> SingleDevice:
    """Scale losses as under float16 on an accelerator, whatever the device and precision; returns the strategy."""
    strategy._scaler = scaler
    return strategy
