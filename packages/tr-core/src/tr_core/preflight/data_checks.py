"""Check the training data."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tr_core.data.batches import batches_of
from tr_core.data.sampler import has_length
from tr_core.data.short_runs import training_batches
from tr_core.model_io import IGNORED_TARGET, batch_size_of, main_input_name
from tr_core.plan import make_plan
from tr_core.preflight.context import SAMPLES, CheckContext, logger
from tr_core.preflight.diagnosis import (
    classes_of,
    id_outside,
    label_outside,
    labels_of,
    not_finite,
    rows_of_embedding,
    scan,
)

_MOST_LEFT_OUT = 0.1
"""Share of the data that may be unused before a warning."""


def check_length(subject: CheckContext) -> None:
    """Find data that is missing, empty, or too short for a batch; record the run's steps and epochs."""
    if not subject.trains:
        return
    trainer, args, figures = subject.trainer, subject.args, subject.figures
    with subject.saying("T101"):
        batches = training_batches(trainer.get_train_dataloader(), args, trainer.strategy)
        plan = make_plan(args, batches)
        subject.steps = figures["steps"] = trainer.state.max_steps = plan.max_steps
        if plan.num_epochs < sys.maxsize:
            subject.epochs = figures["epochs"] = plan.num_epochs
        figures |= {"samples": batches.num_samples, "samples_per_step": plan.samples_per_step}
        dataset: Any = trainer.train_dataset
        whole = len(dataset) if dataset is not None and has_length(dataset) else 0
        unused = whole - (batches.num_samples or whole)
        if args.dataloader_drop_last and unused > _MOST_LEFT_OUT * whole:
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
        batch = next(iter(batches_of(loader, number, trainer.strategy).iterate(0, 0)), None)
    except Exception as error:
        subject.say_why(error, dataset, "T402", f"the first samples of the {what} data cannot be made a batch")
        return None
    return None if batch is None else rows_of(batch.inputs, 0, number)


def rows_of(batch: Any, start: int, stop: int) -> Any:
    """Return some rows of every tensor and list in a batch that has as many rows as the first tensor."""
    size = batch_size_of(batch)

    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: cut(item) for key, item in value.items()}
        has_rows = hasattr(value, "shape") or (isinstance(value, list) and not any(hasattr(v, "shape") for v in value))
        if has_rows:
            return value[start:stop] if getattr(value, "shape", True) != () and len(value) == size else value
        return type(value)(map(cut, value)) if isinstance(value, list | tuple) else value

    return cut(batch)


def _most(data: Any) -> int:
    """Return of how many samples values are read: of many in a list, of some hundred if each may need decoding."""
    return 10_000 if isinstance(data, list | tuple) else 256


def check_samples(subject: CheckContext) -> None:
    """Find a label or an id that the model lacks, and a number that is not finite, before a forward loses a GPU."""
    model, data, inputs = subject.trainer.model, subject.trainer.train_dataset, subject.inputs
    if inputs is None:
        return None
    labels = labels_in(subject)
    find_label(subject, None if labels is None else classes_of(model, labels))
    rows, name = rows_of_embedding(model), main_input_name(model)
    for index, sample in scan(data, _most(data)):
        if text := not_finite(index, sample):
            return subject.say("T409", text)
        ids = sample.get(name) if isinstance(sample, Mapping) else None
        if rows is not None and ids is not None and len(ids) and not 0 <= (most := int(max(ids))) < rows:
            subject.inputs = None
            return subject.say("T514", id_outside(f"sample {index} of the training data", name, most, rows))
    return None


def find_label(subject: CheckContext, classes: int | None) -> None:
    """Find a label in the batch or in the data set that is none of the classes, if their number is known."""
    labels, data, names = labels_in(subject), subject.trainer.train_dataset, subject.trainer.label_names
    subject.classes = classes
    if classes is None or labels is None:
        return None
    first = labels.flatten().tolist()  # the batch is on the host
    for index, label in [*((None, label) for label in first), *labels_of(data, names, _most(data))]:
        if not 0 <= label < classes and label != IGNORED_TARGET:
            subject.inputs = None
            where = "the first samples have" if index is None else f"sample {index} of the training data has"
            return subject.say("T405", label_outside(where, label, classes))
    return None


def labels_in(subject: CheckContext) -> torch.Tensor | None:
    """Return the whole numbers that are labels in the first batch; None without such."""
    inputs = subject.inputs if isinstance(subject.inputs, Mapping) else {}
    found = next((inputs[name] for name in ("labels", *subject.trainer.label_names) if name in inputs), None)
    is_whole = isinstance(found, torch.Tensor) and not found.dtype.is_floating_point and found.dtype != torch.bool
    return found if is_whole else None
