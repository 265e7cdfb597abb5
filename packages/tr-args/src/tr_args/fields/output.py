"""Where results go and how long training lasts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Annotated

from tr_args.constraints import Above, MaxSteps, UserPath
from tr_args.duration import Duration, WallTime
from tr_args.hints import Count
from tr_args.switch_or_count import SwitchOrCount


@dataclass(init=False, repr=False, eq=False)
class OutputFields:
    """Output folder, length and batch size."""

    _title = "Output, length and batch size"

    output_dir: Annotated[str, UserPath()] = "trainer_output"
    """Folder for checkpoints, logs and results; created when training starts. `~` is the home folder."""

    _: KW_ONLY

    overwrite_output_dir: bool = False
    """Write into output_dir even if it holds files of an earlier run, and start anew instead of resuming."""

    num_train_epochs: Annotated[float, Above(0)] = 3.0
    """How many times to go through the training data; fractions stop within the last pass."""

    max_steps: Annotated[int, MaxSteps()] = -1
    """Stop after this many optimizer steps, whatever num_train_epochs says; -1 goes by epochs. Data without a
    length need it."""

    max_time: Annotated[Duration | None, WallTime()] = None
    """Stop after this much wall time of one call of train, such as 8h or 90min: at the end of the step that passes
    it, with a checkpoint to go on from unless save_strategy is no."""

    fast_dev_run: Annotated[bool | int, SwitchOrCount()] = False
    """Try everything out: train one step, or this many, on as many batches of every evaluation and prediction. No
    checkpoints, trackers, Hub or best model; what a script saves goes to a temporary folder, not to output_dir."""

    per_device_train_batch_size: Count = 8
    """Samples a device takes in one forward and backward pass."""
