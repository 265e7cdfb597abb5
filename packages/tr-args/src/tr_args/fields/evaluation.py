"""Declare when and how the model is evaluated, and what is logged, when and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tr_args.constraints import CommaSeparated, Count, NonNegative, OptionalCount, OptionalPath, OptionalSteps, Steps
from tr_args.types.choices import Duration, IntervalStrategy, TokenCounting, WallTime


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


LogLevel = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class LoggingFields:
    """What is logged, when and where."""

    _title = "Logging"

    logging_strategy: Annotated[IntervalStrategy | Duration, WallTime(IntervalStrategy)] = IntervalStrategy.STEPS
    """When to log the loss: no, steps (every logging_steps), epoch, or every so much wall time, such as 30s."""

    logging_steps: Steps = 500
    """Steps between logs; below 1 it is a ratio of all steps."""

    logging_first_step: bool = False
    """Log the first step too."""

    logging_nan_inf_filter: bool = False
    """Leave losses that are NaN or infinite out of the logged mean. Off, a diverging run shows."""

    on_nonfinite: Literal["log", "raise", "skip"] = "log"
    """When a step's loss or gradient norm is NaN or infinite: log it as it is and say how many steps there were; raise
    an error before such weights are evaluated or saved; or skip the update, which is then counted as skipped_steps."""

    logging_dir: OptionalPath = None
    """Folder for the files of trackers such as TensorBoard; unset is a folder in output_dir."""

    log_level: LogLevel = "passive"
    """Log level of the main process; passive is info."""

    log_level_replica: LogLevel = "warning"
    """Log level of all other processes; passive is warning."""

    log_on_each_node: bool = True
    """Let the first process of every machine log as a main process; off, only the very first one does."""

    disable_tqdm: bool | None = None
    """Show no progress bars. Unset shows them unless log_level is error or critical."""

    report_to: Annotated[list[str], CommaSeparated(nothing="none")] = field(default_factory=list)
    """Trackers to report to, such as tensorboard or wandb; "none" for none, "all" for all installed."""

    run_name: str | None = None
    """Name of the run in trackers."""

    include_num_input_tokens_seen: Annotated[Literal["no", "all", "non_padding"], TokenCounting()] = "no"
    """Count the input tokens trained on: all, only non_padding, or no."""
