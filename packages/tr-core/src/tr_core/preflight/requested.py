"""Stop a script where it would start a run, if `trainer check` started this process.

`trainer check script.py` runs the script with the environment variable `TR_PREFLIGHT` set to the path of the report.
Whatever would start a run, an evaluation, a prediction or the saving of a model calls `stop_if_requested` first. So
processes that the script starts itself stop at the same place, and no name has to be replaced.

Progress is written to stderr, because one forward of a large model may take minutes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tr_core.preflight.checked_trainer import CheckedTrainer
from tr_log.terminal import write_line

VARIABLE = "TR_PREFLIGHT"


class PreflightDone(SystemExit):
    """The preflight is made; the script ends here."""


def requested() -> bool:
    """Whether `trainer check` started this process, so that nothing may be trained, sent or written."""
    return VARIABLE in os.environ


def stop_if_requested(
    trainer: CheckedTrainer, *, resume: Any = None, evaluation_data: Any = None, trains: bool = False
) -> None:
    """Make the preflight of `trainer` and end the script, if `trainer check` started this process; else do nothing.

    Args:
        trainer: whose run would begin.
        resume: what `train` was told to resume from.
        evaluation_data: what would be evaluated or predicted, where that is not the Trainer's own data.
        trains: whether training would begin, so that there must be training data. Where something else comes first and
            there is training data, training is checked too.

    Raises:
        PreflightDone: always, where it was asked for.
        RuntimeError: `check` was called with this Trainer.
    """
    if VARIABLE not in os.environ:
        _refuse_if_checked(trainer)
        return
    # Imported here: a process that trains needs none of it.
    from tr_core.preflight.checks import check

    path = Path(os.environ[VARIABLE])
    if not path.exists() or not path.stat().st_size:  # a script may catch what is raised here, and come again
        report = check(
            trainer,
            resume=resume,
            evaluation_data=evaluation_data,
            trains=trains or trainer.train_dataset is not None,
            ends_here=True,
            progress=write_progress,
        )
        if trainer.strategy.rank == 0:
            path.write_text(report.to_json(), encoding="utf-8")
    raise PreflightDone(0)


def _refuse_if_checked(trainer: CheckedTrainer) -> None:
    if trainer.is_checked:
        raise RuntimeError(
            "this Trainer was checked by tr_core.preflight.check, which leaves its model, data and random number "
            "generators changed; build a new one"
        )


def write_progress(text: str) -> None:
    """Write one line to stderr at once, on the first of several processes."""
    if os.environ.get("RANK", "0") == "0":
        write_line(sys.stderr, f"preflight: {text}")
