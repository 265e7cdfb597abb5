"""Accumulation, clipping and regularisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tr_args.constraints import AtLeast, Between
from tr_args.hints import Count


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class RegularizationFields:
    """Accumulation, clipping and regularisation."""

    _title = "Accumulation, clipping and regularisation"

    gradient_accumulation_steps: Count = 1
    """Forward and backward passes whose gradients make one optimizer step."""

    average_tokens_across_devices: bool = True
    """Weigh the loss by the tokens of all processes together, not of each process alone."""

    max_grad_norm: Annotated[float | None, AtLeast(0, "; 0 turns clipping off")] = 1.0
    """Scale gradients down to this total norm; 0 does not clip. The norm is measured either way."""

    label_smoothing_factor: Annotated[float, Between(0, 1, open_end=True)] = 0.0
    """Share of the target probability that is spread over all classes."""

    neftune_noise_alpha: Annotated[float | None, AtLeast(0)] = None
    """Strength of the noise added to embeddings while training (NEFTune); 5 to 15 is usual."""
