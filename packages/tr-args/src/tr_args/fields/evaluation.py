"""When and how the model is evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tr_args.constraints import CommaSeparated
from tr_args.duration import Duration, WallTime
from tr_args.hints import Count, NonNegative, OptionalCount, OptionalSteps
from tr_args.strategies import IntervalStrategy


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class EvaluationFields:
    """When and how the model is evaluated."""

    _title = "Evaluation"

    eval_strategy: Annotated[IntervalStrategy | Duration, WallTime(IntervalStrategy)] = IntervalStrategy.NO
    """When to evaluate: no, steps (every eval_steps), epoch, or every so much wall time, such as 10min or 2h30min.
    With steps and with a time the last step is evaluated too."""

    eval_steps: OptionalSteps = None
    """Steps between evaluations; below 1 it is a ratio of all steps. Unset is logging_steps."""

    eval_delay: NonNegative = 0.0
    """Steps, or epochs with eval_strategy epoch, before the first evaluation."""

    eval_on_start: bool = False
    """Evaluate once before the first step."""

    per_device_eval_batch_size: Count = 8
    """Samples a device takes in one forward pass of evaluation and prediction."""

    prediction_loss_only: bool = False
    """Return only the loss from evaluation and prediction."""

    eval_accumulation_steps: OptionalCount = None
    """Move outputs to the host every so many batches. Unset leaves the moment to the loop."""

    eval_do_concat_batches: bool = True
    """Concatenate the outputs of all batches; off, they stay a list with one entry a batch."""

    eval_use_gather_object: bool = False
    """Keep outputs that are not tensors, gathered from all processes as Python objects: a list holds one a sample."""

    include_for_metrics: Annotated[list[Literal["inputs", "loss"]], CommaSeparated()] = field(default_factory=list)
    """What compute_metrics gets beside predictions and labels: inputs, loss."""

    batch_eval_metrics: bool = False
    """Call compute_metrics on every batch, the last time with compute_result=True."""

    eval_perplexity: bool = False
    """Report perplexity, exp of the mean loss of a token; only for a loss over tokens that is not smoothed."""
