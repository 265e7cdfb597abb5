"""Hold what belongs to one call of `train`: plan, data, place in them, and the window since the last log."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from tr_core.batches import Batches
from tr_core.protocols import Collectives
from tr_core.steps import Plan


@dataclass
class DataPosition:
    """Which sample comes next: a pure count, so that batch size and world size may change at resume.

    Attributes:
        epoch: the pass over the data, from 0.
        samples: samples of that pass consumed by all ranks together.
    """

    epoch: int = 0
    samples: int = 0


@dataclass
class Run:
    """One call of `train`.

    Attributes:
        plan: how long the run is.
        data: passes over the training data.
        collectives: how ranks exchange what they hold.
        optimizer: what applies the gradients.
        schedule: what sets the learning rate.
        loss_sum: sum of the losses of this rank's steps since the last log, a scalar tensor on the device.
        position: where in the data the run is.
        count_items: what counts the targets of a step, None where nothing needs the count.
        max_grad_norm: norm that gradients are clipped to; None for no clipping.
        schedule_follows_metric: whether the schedule is stepped with an evaluation's result, not after every step.
        counts_flops: whether floating-point operations can be told.
        hides_nan: whether losses that are not finite are left out of the log.
        grad_norm: norm of the last step's gradients before clipping, on the device.
        learning_rate: learning rate of the first parameter group in the last step.
        flops: floating-point operations since they were last added to the state.
        first_step: completed steps of the run when this call began.
        last_logged_step: step of the last log.
        logged_loss: sum over the steps of this call of the losses already logged.
        start_s: `time.perf_counter()` at the beginning.
        ignore_keys: outputs of the model that evaluations leave out.
        window: loss sum and operations of every rank since the last log, as they are to be saved.
    """

    plan: Plan
    data: Batches
    collectives: Collectives
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    loss_sum: torch.Tensor
    position: DataPosition = field(default_factory=DataPosition)
    count_items: Any = None
    max_grad_norm: float | None = None
    schedule_follows_metric: bool = False
    counts_flops: bool = False
    hides_nan: bool = False
    grad_norm: torch.Tensor | None = None
    learning_rate: float = 0.0
    flops: float = 0.0
    first_step: int = 0
    last_logged_step: int = 0
    logged_loss: float = 0.0
    start_s: float = field(default_factory=time.perf_counter)
    ignore_keys: list[str] | None = None
    window: list[tuple[float, float]] = field(default_factory=list)

    def is_pass_complete(self) -> bool:
        """Whether the pass that `position` is in has no batch left; False where that cannot be known."""
        return self.position.samples > 0 and self.data.remaining(self.position.samples) == 0

    def finite(self, loss: torch.Tensor, step: int) -> torch.Tensor:
        """Return a loss for the log: in place of one that is not finite, the mean of the window so far.

        Nothing is read from the device.

        Args:
            loss: scalar, a micro-batch's share of its step's loss.
            step: completed steps.
        """
        return torch.where(torch.isfinite(loss), loss, self.loss_sum / (1 + step - self.last_logged_step))

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data and the open log window, that of every rank; see `collect_window`."""
        return {
            "epoch": self.position.epoch,
            "samples": self.position.samples,
            "last_logged_step": self.last_logged_step,
            "learning_rate": self.learning_rate,
            "grad_norm": None if self.grad_norm is None else self.grad_norm.item(),  # sync: once a save
            "window": self.window,
        }

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over the place in the data and the log window; another number of ranks shares the window evenly."""
        self.position = DataPosition(state_dict["epoch"], state_dict["samples"])
        self.last_logged_step = state_dict["last_logged_step"]
        # For the log at the end of an epoch, if the checkpoint is of its last step.
        self.learning_rate, grad_norm = state_dict["learning_rate"], state_dict["grad_norm"]
        self.grad_norm = None if grad_norm is None else torch.full_like(self.loss_sum, grad_norm)
        window = state_dict["window"]
        rank, world_size = self.collectives.rank, self.collectives.world_size
        if len(window) == world_size:
            loss, self.flops = window[rank]
        else:
            loss = sum(entry[0] for entry in window) / len(window)
            self.flops = sum(entry[1] for entry in window) / world_size
        self.loss_sum = torch.full_like(self.loss_sum, loss)
        # What an earlier call trained belongs to the next log, but not to the mean loss of this call.
        self.logged_loss = -sum(entry[0] for entry in window) / len(window)

    def collect_window(self) -> None:
        """Read the log window of all ranks, to be saved: a log after a resume is then what it would have been."""
        self.window = self.collectives.gather_objects((self.loss_sum.item(), self.flops))  # sync: once a save
