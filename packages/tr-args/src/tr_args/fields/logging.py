"""What is logged, when and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tr_args.constraints import CommaSeparated
from tr_args.duration import Duration, WallTime
from tr_args.hints import OptionalPath, Steps
from tr_args.strategies import IntervalStrategy
from tr_args.token_counting import TokenCounting

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
