"""Check the training data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from tr_core.data.batches import batches_of
from tr_core.data.sampler import has_length
from tr_core.data.short_runs import training_batches
from tr_core.model_io import rows_of
from tr_core.plan import make_plan
from tr_core.preflight.context import SAMPLES, CheckContext, logger
from tr_core.preflight.diagnosis import limits_of, limits_of_labels, misfits, scan


def check_length(subject: CheckContext) -> None:
    """Find data that is missing, empty, or too short for a batch; record the run's steps and epochs."""
    if not subject.trains:
        return
    trainer, args, figures = subject.trainer, subject.args, subject.figures
    with subject.saying("T101"):
        batches = training_batches(trainer.get_train_dataloader(), args, trainer.strategy.data)
        plan = make_plan(args, batches)
        subject.steps = figures["steps"] = trainer.state.max_steps = plan.max_steps
        if plan.num_epochs < sys.maxsize:
            subject.epochs = figures["epochs"] = plan.num_epochs
        figures |= {"samples": batches.num_samples, "samples_per_step": plan.samples_per_step}
        dataset: Any = trainer.train_dataset
        whole = len(dataset) if dataset is not None and has_length(dataset) else 0
        unused = whole - (batches.num_samples or whole)
        if args.dataloader_drop_last and unused > whole / 10:
            subject.say(
                "T108",
                f"dataloader_drop_last=True leaves {unused} of {whole} samples out of every epoch, at "
                f"{batches.samples_per_micro_batch} samples a micro-batch; set it to False, or lower "
                "per_device_train_batch_size",
                "dataloader_drop_last",
            )
    subject.trains = subject.steps is not None


def check_first_batch(subject: CheckContext) -> None:
    """Load and collate two samples, and store them for later checks."""
    if subject.trains:
        logger.info("check: loading two samples")
        own = subject.trainer.overrides("get_train_dataloader")
        loader = subject.trainer.get_train_dataloader() if own else None
        subject.inputs = first_batch(subject, subject.trainer.train_dataset, "training", loader=loader)


def first_batch(
    subject: CheckContext, dataset: Any, what: str, number: int = SAMPLES, *, loader: Any = None
) -> Any | None:
    """Return the first samples of a data set, or of a loader, as a micro-batch that is made as in the run.

    None if that fails, or would change what training gets.
    """
    trainer = subject.trainer
    if isinstance(dataset if loader is None else loader, Iterator) and not subject.ends_here:
        subject.say("T406", f"the {what} data can be read only once: it was left alone, and the model untried")
        return None
    try:
        if loader is None:
            loader = trainer._get_dataloader(dataset, f"check of the {what} data", number)
        batch = next(iter(batches_of(loader, number, trainer.strategy.data).iterate(0, 0)), None)
    except Exception as error:
        subject.say_why(error, dataset, "T402", f"the first samples of the {what} data cannot be made a batch")
        return None
    return None if batch is None else rows_of(batch.inputs, 0, number)


def check_samples(subject: CheckContext, classes: int = 0) -> None:
    """Find a label or an id that the model lacks, and a number that is not finite, before a forward loses a GPU."""
    trainer, data = subject.trainer, subject.trainer.train_dataset
    if subject.inputs is None:
        return
    limits = limits_of(trainer.model, trainer.label_names, subject.inputs)
    if classes:
        limits |= limits_of_labels(trainer.label_names, classes)
    most = 10_000 if isinstance(data, list | tuple) else 256  # each sample of other data may need decoding
    samples = ((f"sample {index} of the training data", sample) for index, sample in scan(data, most))
    for code, text in misfits(samples, limits):
        if all(problem.code != code for problem in subject.problems):
            subject.say(code, text)
        subject.inputs = None if code != "T409" else subject.inputs
