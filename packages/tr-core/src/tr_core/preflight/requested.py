"""Stop a script where it would start a run, if `trainer check` started this process.

`trainer check script.py` runs the script with the environment variable `TR_PREFLIGHT` set to the path of the report.
Whatever would start a run, an evaluation, a prediction or the saving of a model calls `stop_if_requested` first. So
processes that the script starts itself stop at the same place, and no name has to be replaced.

Progress is written to stderr, because one forward of a large model may take minutes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_core.protocols import Checkpointer, Strategy
from tr_core.state import TrainerState
from tr_log.terminal import write_line

VARIABLE = "TR_PREFLIGHT"


class CheckedTrainer(Protocol):
    """What a preflight looks at: a Trainer's data, model, loss and optimizer, and the methods that a user may override.

    The attributes and methods are those of `Trainer`.
    """

    args: Any
    strategy: Strategy
    model: nn.Module
    model_wrapped: nn.Module
    state: TrainerState
    lr_scheduler: LRScheduler | None
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    label_names: list[str]
    callback_handler: Any
    compute_metrics: Any
    loss_rule: Any
    step_function: Callable[..., torch.Tensor]
    scope: Any
    is_in_train: bool
    is_checked: bool
    _loss_takes_count: bool

    @property
    def compute_loss(self) -> Callable[..., Any]:
        """Compute the loss of one batch."""
        ...

    @property
    def create_optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        """Build the optimizer, unless there is one."""
        ...

    @property
    def create_scheduler(self) -> Callable[..., LRScheduler]:
        """Build the schedule, unless there is one."""
        ...

    @property
    def evaluation_loop(self) -> Callable[..., Any]:
        """Go through evaluation data."""
        ...

    @property
    def get_train_dataloader(self) -> Callable[..., Any]:
        """Build the loader of the training data."""
        ...

    @property
    def _collator(self) -> Callable[..., Any]: ...

    def overrides(self, *names: str) -> bool:
        """Whether a user replaced one of the methods of these names."""
        ...

    def prepare(self) -> nn.Module:
        """Return the model as the strategy wrapped it."""
        ...

    @property
    def training_context(self) -> Callable[..., AbstractContextManager[None]]:
        """Surround a run by what the arguments ask of device and model while it trains."""
        ...

    def checkpointer(self) -> Checkpointer:
        """Return where checkpoints go."""
        ...

    @property
    def get_num_trainable_parameters(self) -> Callable[..., int]:
        """Count the numbers that training changes."""
        ...


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
