"""Hold the data of the current step and micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tr_core.metric_means import MetricWindow
from tr_core.protocols import Collectives


@dataclass(slots=True)
class StepScope:
    """Hold the data of the current step, for the functions called within it.

    It is a separate object so that a step assigns nothing to the Trainer, which checks all assignments to it.

    Attributes:
        size: micro-batches of the step.
        number: how many of them this rank has begun to compute.
        size_was_read: whether `current_gradient_accumulation_steps` was read; by whom is for its reader to know.
        is_last: whether the micro-batch is the last of its step; True outside a step.
        weight: weight of this rank's share of the micro-batch; 0.0 for a sample that belongs to another rank.
        total: samples of the micro-batch on all ranks; None if each rank knows only its own, and outside a batch.
        inputs: the micro-batch, as its loader gave it, while its forward, loss and backward are computed: an exception
            leaves it here. None at any other time.
        loss: loss of the last step on this rank, a scalar tensor on the device; None before the first.
        outputs: the model's outputs for this micro-batch, if a callback wants them.
        metrics: the window that `log_metric` adds to: of a run, or of an evaluation; None outside both.
    """

    size: int = 1
    number: int = 0
    size_was_read: bool = False
    is_last: bool = True
    weight: float = 1.0
    total: int | None = None
    inputs: Any = None
    loss: torch.Tensor | None = None
    outputs: Any = None
    metrics: MetricWindow | None = None

    @contextmanager
    def separate_window(self, collectives: Collectives, *, is_exact: bool = False) -> Iterator[MetricWindow]:
        """Collect metrics logged inside the block apart from those of training."""
        outer, window = self.metrics, MetricWindow(collectives, is_exact=is_exact)
        self.metrics = window
        try:
            yield window
        finally:
            self.metrics, self.weight, self.total = outer, 1.0, None
