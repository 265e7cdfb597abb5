"""Hold what is kept of the gradients of one step until it is applied."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tr_optim.engine.sketches import Sketch
from tr_optim.projection.basis import Basis
from tr_optim.projection.encoded import EncodedBasis


@dataclass
class Window:
    """The micro-batches since the last step.

    Attributes:
        projected: sums of projected gradients, by parameter; of those without a projection, of gradients.
        whole: sums of whole gradients, of the matrices that find a new basis in this step.
        bases: those new bases, as they will be kept.
        sketch: of gradients whose sum is never there; None if there are none.
        norms: norms of the gradients whose sum was there; or of projections, of those in the sketch that are applied.
        num_micro_batches: backward passes.
        is_complete: whether the last was the step's last.
    """

    projected: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    whole: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    bases: dict[torch.Tensor, Basis | EncodedBasis] = field(default_factory=dict)
    sketch: Sketch | None = None
    norms: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)
    num_micro_batches: int = 0
    is_complete: bool = False


def add(sums: dict[torch.Tensor, torch.Tensor], parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Add to a parameter's sum, in place after the first, and return it."""
    if parameter in sums:
        sums[parameter].add_(value)
    else:
        sums[parameter] = value
    return sums[parameter]
