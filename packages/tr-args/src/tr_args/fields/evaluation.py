"""Declare when and how the model is evaluated, and what is logged, when and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tr_args.constraints import (
    Above,
    AtLeast,
    CommaSeparated,
    Count,
    Later,
    NonNegative,
    Numbers,
    OptionalCount,
    OptionalPath,
    OptionalSteps,
    Steps,
)
from tr_args.types.choices import ConsecutiveSteps, Intervals, IntervalStrategy, StepRange, TokenCounting


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class EvaluationFields:
    """When and how the model is evaluated."""

    _title = "Evaluation"

    eval_strategy: Annotated[Intervals, Numbers.OTHER, Later.NEXT_STEP] = IntervalStrategy.NO
    """When to evaluate: no, steps (every eval_steps), epoch, or every so much wall time, such as 10min or 2h30min.
    With steps and with a time the last step is evaluated too."""

    eval_steps: Annotated[OptionalSteps, Numbers.OTHER, Later.NEXT_STEP] = None
    """Steps between evaluations; below 1 it is a ratio of all steps. Unset is logging_steps."""

    eval_delay: Annotated[NonNegative, Numbers.OTHER, Later.NEXT_STEP] = 0.0
    """Steps, or epochs with eval_strategy epoch, before the first evaluation."""

    eval_on_start: Annotated[bool, Numbers.OTHER, Later.NEXT_RUN] = False
    """Evaluate once before the first step."""

    per_device_eval_batch_size: Annotated[Count, Numbers.OTHER, Later.NEXT_EVALUATION] = 8
    """Samples a device takes in one forward pass of evaluation and prediction."""

    prediction_loss_only: Annotated[bool, Numbers.OTHER, Later.NEXT_EVALUATION] = False
    """Return only the loss from evaluation and prediction."""

    eval_accumulation_steps: Annotated[OptionalCount, Numbers.OTHER, Later.NEXT_EVALUATION] = None
    """Move outputs to the host every so many batches. Unset lets the loop choose."""

    eval_do_concat_batches: Annotated[bool, Numbers.OTHER, Later.NEXT_EVALUATION] = True
    """Concatenate the outputs of all batches; off, they stay a list with one entry a batch."""

    eval_use_gather_object: Annotated[bool, Numbers.OTHER, Later.NEXT_EVALUATION] = False
    """Keep outputs that are not tensors, gathered from all processes as Python objects: a list holds one a sample."""

    include_for_metrics: Annotated[
        list[Literal["inputs", "loss"]], CommaSeparated(), Numbers.OTHER, Later.NEXT_EVALUATION
    ] = field(default_factory=list)
    """Further values for compute_metrics, beside predictions and labels: inputs, loss."""

    batch_eval_metrics: Annotated[bool, Numbers.OTHER, Later.NEXT_EVALUATION] = False
    """Call compute_metrics on every batch, the last time with compute_result=True."""

    eval_perplexity: Annotated[bool, Numbers.OTHER, Later.NEXT_EVALUATION] = False
    """Report perplexity, exp of the mean loss per token. Needs a loss over tokens without label smoothing."""


LogLevel = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class LoggingFields:
    """What is logged, when and where."""

    _title = "Logging"

    logging_strategy: Annotated[Intervals, Numbers.UNCHANGED, Later.NEXT_STEP] = IntervalStrategy.STEPS
    """When to log the loss: no, steps (every logging_steps), epoch, or every so much wall time, such as 30s."""

    logging_steps: Annotated[Steps, Numbers.UNCHANGED, Later.NEXT_STEP] = 500
    """Steps between logs; below 1 it is a ratio of all steps."""

    logging_first_step: Annotated[bool, Numbers.UNCHANGED, Later.NEXT_STEP] = False
    """Log the first step too."""

    logging_nan_inf_filter: Annotated[bool, Numbers.UNCHANGED, Later.NEXT_STEP] = False
    """Leave losses that are NaN or infinite out of the logged mean. Off, the log shows a diverging run."""

    on_nonfinite: Annotated[Literal["log", "raise", "skip"], Numbers.OTHER] = "log"
    """What to do when a step's loss or gradient norm is NaN or infinite. log: log it as it is, with the number of such
    steps. raise: raise an error before such weights are evaluated or saved. skip: skip the update, and count it as
    skipped_steps."""

    on_spike: Annotated[Literal["rewind"] | None, Numbers.OTHER, Later.NEW_TRAINER] = None
    """rewind: if a step's loss or gradient norm is NaN or infinite, or its loss is a spike, go back to a snapshot in
    memory, leave out the batches of that step, and go on."""

    spike_deviations: Annotated[float, Above(0), Numbers.OTHER, Later.NEXT_STEP] = 10.0
    """With on_spike: a loss is a spike if it exceeds the median of the last 128 by so many deviations."""

    snapshot_steps: Annotated[int, AtLeast(1), Numbers.UNCHANGED, Later.NEXT_STEP] = 64
    """With on_spike or trainer launch --elastic: steps between snapshots, which hold weights and optimizer state once
    more."""

    max_rewinds: Annotated[int, AtLeast(1), Numbers.UNCHANGED, Later.NEXT_STEP] = 10
    """With on_spike: how often batches are left out before the run ends with an error."""

    logging_dir: Annotated[OptionalPath, Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """Folder for the files of trackers such as TensorBoard; unset is a folder in output_dir."""

    log_level: Annotated[LogLevel, Numbers.UNCHANGED, Later.NEW_TRAINER] = "passive"
    """Log level of the main process; passive is info."""

    log_level_replica: Annotated[LogLevel, Numbers.UNCHANGED, Later.NEW_TRAINER] = "warning"
    """Log level of all other processes; passive is warning."""

    log_on_each_node: Annotated[bool, Numbers.UNCHANGED, Later.NEW_TRAINER] = True
    """Let the first process of every machine log as a main process; off, only the very first one does."""

    disable_tqdm: Annotated[bool | None, Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """Show no progress bars. Unset shows them unless log_level is error or critical."""

    report_to: Annotated[list[str], CommaSeparated(nothing="none"), Numbers.UNCHANGED, Later.NEW_TRAINER] = field(
        default_factory=list
    )
    """Trackers to report to, such as tensorboard, wandb or trackio; "none" for none, "all" for all installed."""

    run_name: Annotated[str | None, Numbers.UNCHANGED, Later.NEW_TRAINER] = None
    """Name of the run in trackers."""

    project: Annotated[str, Numbers.UNCHANGED] = "huggingface"
    """Name of the project in Trackio."""

    trackio_space_id: Annotated[str | None, Numbers.UNCHANGED] = None
    """Space on the Hub that Trackio reports to while training; unset reports to a local folder."""

    trackio_bucket_id: Annotated[str | None, Numbers.UNCHANGED] = None
    """Bucket on the Hub that holds Trackio's data; unset lets Trackio choose."""

    trackio_static_space_id: Annotated[str | bool | None, Numbers.UNCHANGED] = None
    """Static Space that Trackio makes after training, if it has reported to a Space; False makes none."""

    include_num_input_tokens_seen: Annotated[
        Literal["no", "all", "non_padding"], TokenCounting(), Numbers.UNCHANGED
    ] = "no"
    """Count the input tokens trained on: all, only non_padding, or no."""

    count_flops: Annotated[bool, Numbers.UNCHANGED] = False
    """Count the operations of one micro-batch for the rates in the report, instead of six per parameter and token."""

    peak_flops: Annotated[float | None, Above(0), Numbers.UNCHANGED, Later.NEXT_STEP] = None
    """Operations per second of one device at its peak, for MFU; unset looks it up by the name of the device."""

    profile_steps: Annotated[StepRange | None, ConsecutiveSteps(), Numbers.UNCHANGED] = None
    """Record what these optimizer steps spend their time on, such as 10:15 or 10: a trace for Perfetto, a memory
    snapshot (CUDA) and the dearest operators, in output_dir/profile and in the report. Recorded steps are slower."""
