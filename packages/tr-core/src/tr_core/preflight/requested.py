"""Stop a script at the start of its run, if `trainer check` started this process.

`trainer blame script.py` does so by `TR_BLAME`, which holds what to replay, as JSON.

`trainer check script.py` runs the script with the environment variable `TR_PREFLIGHT` set to the path of the report.
Every method that starts a run, an evaluation, a prediction or the saving of a model calls `stop_if_requested` first. So
processes that the script starts itself stop at the same point, and nothing is patched.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tr_args import ArgumentsError
from tr_args.process import read_topology

if TYPE_CHECKING:  # a Trainer is made without what a preflight needs
    from tr_core.trainer_methods import TrainerMethods

VARIABLE, BLAME = "TR_PREFLIGHT", "TR_BLAME"


class PreflightDone(SystemExit):
    """Ends the script after its preflight."""


def requested() -> bool:
    """Whether `trainer check` started this process, so that it must not train, send or write anything."""
    return VARIABLE in os.environ


def replays() -> bool:
    """Whether `trainer blame` started this process, so that it replays a step."""
    return BLAME in os.environ


def stop_if_requested(
    trainer: TrainerMethods,
    *,
    resume: Any = None,
    evaluation_data: Any = None,
    trains: bool = False,
    is_train: bool = False,
) -> None:
    """Run the preflight of `trainer` and end the script, if `trainer check` started this process; else do nothing.

    Without `trains`, training is checked only with training data. `is_train`: whether `train` calls this, which
    `trainer blame` replays; anything else it refuses.
    """
    if BLAME in os.environ and not trainer.is_in_train:
        from tr_core.preflight.blame import replay

        asked = json.loads(os.environ[BLAME])
        if not Path(asked["answer"]).exists():  # a script may catch the exception
            if not is_train:
                raise ValueError(
                    "trainer blame replays train(), and the script calls another method of the Trainer before it, as "
                    "evaluate, predict, save_model or hyperparameter_search: start it with arguments that leave it out"
                )
            replay(trainer, asked, resume)
        raise PreflightDone(0)
    if VARIABLE not in os.environ:
        if trainer.is_checked:
            raise RuntimeError(
                "this Trainer was checked by tr_core.preflight.check, which leaves its model, data and random number "
                "generators changed; build a new one"
            )
        return
    # Imported here: a process that trains does not need it.
    from tr_core.preflight.checks import check

    path = Path(os.environ[VARIABLE])
    if not path.exists() or not path.stat().st_size:  # a script may catch this exception and call again
        report = check(
            trainer,
            resume=resume,
            evaluation_data=evaluation_data,
            trains=trains or trainer.train_dataset is not None,
            ends_here=True,
        )
        if trainer.strategy.rank == 0:
            path.write_text(report.to_json(), encoding="utf-8")
    raise PreflightDone(0)


def is_first_process() -> bool:
    """Whether this is rank 0, or the launcher's variables cannot be read: every rank then reports that."""
    try:
        return read_topology().rank == 0
    except ArgumentsError:
        return True
