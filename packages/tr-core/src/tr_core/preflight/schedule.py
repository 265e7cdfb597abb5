"""Look whether the schedule of the learning rate can be built."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tr_core.losses.loss import takes_argument
from tr_core.optimization.schedules import get_scheduler
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject


def check_schedule(subject: Subject) -> Iterator[Problem]:
    """Build the schedule for an optimizer that stands in for the run's, which it would change."""
    args, trainer = subject.args, subject.given_trainer
    if trainer is not None and (not subject.trains or trainer.lr_scheduler is not None):
        return
    steps = subject.steps or 1
    stand_in = _stand_in(subject.optimizer, args.learning_rate)
    try:
        if trainer is not None:
            if takes_argument(trainer.create_scheduler, "optimizer"):  # else it would change the run's own
                trainer.create_scheduler(num_training_steps=steps, optimizer=stand_in)
        else:
            get_scheduler(
                args.lr_scheduler_type,
                stand_in,
                args.get_warmup_steps(steps),
                steps,
                dict(args.lr_scheduler_kwargs or {}),
            )
    except (ValueError, TypeError) as error:
        name = "lr_scheduler_kwargs" if args.lr_scheduler_kwargs else "lr_scheduler_type"
        yield Problem("T305", str(error), subject.origin(name))


def _stand_in(optimizer: torch.optim.Optimizer | None, learning_rate: float) -> torch.optim.Optimizer:
    rates = [learning_rate] if optimizer is None else [group["lr"] for group in optimizer.param_groups]
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups, momentum=0.9)
