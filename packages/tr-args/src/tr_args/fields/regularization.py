"""Accumulation, clipping and regularisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tr_args.constraints import AtLeast, Between
from tr_args.hints import Count, NonNegativeInt


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

    neftune_length: Literal["real", "padded"] = "real"
    """What the noise of a row is measured by: its real tokens, padding then getting none, or the padded length of its
    batch, by which short rows get less."""

    ema_decay: Annotated[float | None, Between(0, 1, open_start=True, open_end=True)] = None
    """Keep an exponential moving average of the weights, in float32: after an update a share of 1 - ema_decay is of
    the new weights; 0.999 is usual. Evaluation, prediction, save_model, load_best_model_at_end and the model that
    train leaves are the average. Checkpoints hold the raw weights, to resume from, and the average beside them."""

    ema_start_step: NonNegativeInt = 0
    """Optimizer steps before the average begins; until then the weights stand for it."""

    ema_update_steps: Count = 1
    """Optimizer steps between updates of the average; ema_decay is that of one update."""
