"""Hold what is known of the step and micro-batch that are being made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class StepScope:
    """What the loop knows of the step at hand, for what is called within it.

    It is an object of its own so that a step assigns nothing to the Trainer, which looks at what users assign to it.

    Attributes:
        size: micro-batches of the step.
        weight: weight of this rank's share of the micro-batch; 0.0 for a sample that is another rank's.
        loss: loss of the last step on this rank, a scalar tensor on the device; None before the first.
        outputs: what the model gave for this micro-batch, where a callback asks for it.
    """

    size: int = 1
    weight: float = 1.0
    loss: torch.Tensor | None = None
    outputs: Any = None
