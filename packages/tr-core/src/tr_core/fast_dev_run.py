"""Try a script out in a step or two, and leave nothing behind."""

from __future__ import annotations

import copy
import shutil
import tempfile
import weakref
from itertools import islice
from typing import Any

from tr_log import get_logger

logger = get_logger(__name__)


def dev_run_arguments(args: Any) -> Any:
    """Return the arguments of the short run that `fast_dev_run` asks for, or `args` themselves without it.

    They say: so many steps, each logged, evaluations from the first step on; no checkpoints, no resuming, no trackers,
    no Hub, no best model at the end; and `output_dir` is a temporary folder, which goes with the returned object.
    """
    steps = int(args.fast_dev_run)
    if not steps:
        return args
    trial, output_dir = copy.copy(args), args.output_dir
    folder = tempfile.mkdtemp(prefix="fast_dev_run-")
    changes = {
        "output_dir": folder,
        "max_steps": steps if args.max_steps <= 0 else min(steps, args.max_steps),
        "logging_strategy": "steps",
        "logging_steps": 1,
        "eval_delay": 0,
        "save_strategy": "no",
        "load_best_model_at_end": False,
        "enable_jit_checkpoint": False,
        "report_to": [],
        "push_to_hub": False,
    }
    for name, value in changes.items():
        setattr(trial, name, value)
    weakref.finalize(trial, shutil.rmtree, folder, ignore_errors=True)
    logger.info(
        "fast_dev_run=%r: %d training steps, and as many batches of every evaluation and prediction; no checkpoints, "
        "trackers, Hub or best model. %s is not touched: what is saved goes to a temporary folder",
        args.fast_dev_run,
        trial.max_steps,
        output_dir,
    )
    return trial


def dev_run_batches(batches: Any, args: Any) -> Any:
    """Return the batches that an evaluation or prediction goes through: all, or as many as a trial run takes."""
    return islice(batches, int(args.fast_dev_run)) if args.fast_dev_run else batches
