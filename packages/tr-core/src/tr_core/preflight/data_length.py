"""Look whether there is data to train on, and reckon how long the run is."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from tr_core.checks import overrides_loader
from tr_core.data.batches import Batches
from tr_core.data.first_batches import training_batches
from tr_core.data.loaders import has_length
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject
from tr_core.steps import make_plan

_MUCH = 0.1
"""Share of the data that may be left out before it is worth a warning."""


def check_length(subject: Subject) -> Iterator[Problem]:
    """Find data that is missing, empty, or gives no batch; note the run's steps and epochs."""
    if not subject.trains:
        return
    trainer, args, figures = subject.trainer, subject.args, subject.figures
    if trainer.train_dataset is None and not overrides_loader(trainer):
        yield Problem("T401", "train_dataset is None; pass the Trainer data to train on, or do not call train")
        return
    batches = training_batches(trainer.get_train_dataloader(), args, trainer.strategy.world_size)
    try:
        plan = make_plan(args, batches)
    except ValueError as error:
        origin = subject.origin("max_steps") if batches.num_batches is None else _origin_of_no_batch(subject)
        yield Problem("T102" if batches.num_batches is None else "T101", str(error), origin)
        return
    subject.steps = figures["steps"] = plan.max_steps
    if plan.num_epochs < sys.maxsize:
        subject.epochs = figures["epochs"] = plan.num_epochs
    figures |= {"samples": batches.num_samples, "samples_per_step": plan.per_step}
    yield from _left_out(subject, batches)


def _origin_of_no_batch(subject: Subject) -> str:
    dataset = subject.trainer.train_dataset
    is_empty = has_length(dataset) and len(dataset) == 0
    return "" if is_empty else subject.origin("dataloader_drop_last")


def _left_out(subject: Subject, batches: Batches) -> Iterator[Problem]:
    dataset = subject.trainer.train_dataset
    if not subject.args.dataloader_drop_last or batches.num_samples is None or not has_length(dataset):
        return
    unused = len(dataset) - batches.num_samples
    if unused > _MUCH * len(dataset):
        yield Problem(
            "T108",
            f"dataloader_drop_last=True leaves {unused} of {len(dataset)} samples out of every epoch, at "
            f"{batches.per_micro_batch} samples a micro-batch; set it to False, or lower per_device_train_batch_size",
            subject.origin("dataloader_drop_last"),
        )
