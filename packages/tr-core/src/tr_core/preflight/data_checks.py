"""Check the training data."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import sys
from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch

from tr_core.data.loaders import is_map_style
from tr_core.data.sampler import has_length
from tr_core.data.short_runs import training_batches
from tr_core.model_io import IGNORED_TARGET, batch_size_of, main_input_name
from tr_core.plan import make_plan
from tr_core.preflight.context import SAMPLES, CheckContext
from tr_core.preflight.diagnosis import (
    Failure,
    classes_of,
    diagnose,
    id_outside,
    label_outside,
    labels_of,
    not_finite,
    rows_of_embedding,
    scan,
)
from tr_core.random_state import separate_randomness

_MOST_LEFT_OUT = 0.1
"""Share of the data that may be unused before a warning."""


def check_length(subject: CheckContext) -> None:
    """Find data that is missing, empty, or too short for a batch; record the run's steps and epochs."""
    if not subject.trains:
        return
    trainer, args, figures = subject.trainer, subject.args, subject.figures
    dataset: Any = trainer.train_dataset
    if dataset is None and not trainer.overrides("get_train_dataloader"):
        subject.say("T401", "train_dataset is None; pass the Trainer data to train on, or do not call train")
        return
    batches = training_batches(trainer.get_train_dataloader(), args, trainer.strategy)
    whole = len(dataset) if dataset is not None and has_length(dataset) else None
    try:
        plan = make_plan(args, batches)
    except ValueError as error:
        if batches.num_batches is None:
            subject.say("T102", str(error), "max_steps")
        else:
            subject.say("T101", str(error), *(["dataloader_drop_last"] if whole else []))
        return
    subject.steps = figures["steps"] = plan.max_steps
    if plan.num_epochs < sys.maxsize:
        subject.epochs = figures["epochs"] = plan.num_epochs
    figures |= {"samples": batches.num_samples, "samples_per_step": plan.samples_per_step}
    unused = (whole or 0) - (batches.num_samples or 0)
    if args.dataloader_drop_last and batches.num_samples is not None and unused > _MOST_LEFT_OUT * (whole or 0):
        subject.say(
            "T108",
            f"dataloader_drop_last=True leaves {unused} of {whole} samples out of every epoch, at "
            f"{batches.samples_per_micro_batch} samples a micro-batch; set it to False, or lower "
            "per_device_train_batch_size",
            "dataloader_drop_last",
        )


def check_first_batch(subject: CheckContext) -> None:
    """Load and collate two samples, and store them for later checks."""
    trainer = subject.trainer
    has_loader = trainer.overrides("get_train_dataloader")
    if not subject.trains or (trainer.train_dataset is None and not has_loader):
        return
    subject.progress("loading two samples")
    if not has_loader:
        subject.inputs = collate(subject, trainer.train_dataset, "training")
        return
    try:
        samples = read_first(trainer.get_train_dataloader(), 1, may_use_up=subject.ends_here)
    except Exception as error:
        subject.say_error("T402", "the loader of the training data fails", error)
        return
    if samples is None:
        subject.say("T406", "the training data can be read only once: it was left alone, and the model untried")
    elif samples:
        subject.inputs = rows_of(samples[0], 0, SAMPLES)


def collate(subject: CheckContext, dataset: Any, what: str, number: int = SAMPLES) -> Any:
    """Return a batch of the first samples of a data set, as in the run; None if there is none."""
    with separate_randomness(subject.args.seed):
        try:
            if is_map_style(dataset):
                samples = read_samples(dataset, [i % len(dataset) for i in range(number)] if len(dataset) else [])
            else:
                samples = read_first(dataset, number, may_use_up=subject.ends_here)
        except Exception as error:
            return _say_why(subject, error, "T402", f"a sample of the {what} data cannot be loaded")
        if samples is None:
            subject.say("T406", f"the {what} data can be read only once: it was left alone, and the model untried")
        if not samples:
            return None
        collator = subject.trainer._get_collator_with_removed_columns(subject.trainer.data_collator)
        name = getattr(collator, "__qualname__", type(collator).__name__)
        try:
            return collator(copy.deepcopy(samples))  # a collator may change them
        except Exception as error:
            failed = f"{len(samples)} samples of the {what} data cannot be made a batch by {name}"
            return _say_why(subject, error, "T403", f"{failed}; the first one is {describe(samples[0])}")


def _say_why(subject: CheckContext, error: Exception, code: str, failed: str) -> None:
    code, why = diagnose(Failure(error, subject.trainer)) or (code, "")
    subject.say_error(code, f"{failed}; {why}" if why else failed, error)


def read_samples(dataset: Any, indices: list[int]) -> list[Any]:
    """Return samples of map-style data, as a run reads them."""
    get_many = getattr(dataset, "__getitems__", None)
    return list(get_many(indices)) if get_many is not None else [dataset[index] for index in indices]


def read_first(source: Any, number: int, *, may_use_up: bool) -> list[Any] | None:
    """Return the first items of an iterable; None if reading them would change what training gets."""
    iterator = iter(source)
    return None if iterator is source and not may_use_up else list(islice(iterator, number))


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


def describe(value: Any) -> str:
    """Return what a sample is made of: the types and sizes of its parts."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(item)}" for key, item in value.items()) + "}"
    shape = tuple(value.shape) if hasattr(value, "shape") else f"of {len(value)}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__} {shape}".rstrip()


_IN_MEMORY, _ELSEWHERE = 10_000, 256
"""Samples whose values are read: many from a list, some hundred if each sample may need decoding."""


def check_labels(subject: CheckContext) -> None:
    """Compare labels with the number of classes in the model's configuration, before a forward."""
    labels = _label_tensor(subject)
    subject.classes = None if labels is None else classes_of(subject.trainer.model, labels)
    if subject.classes is not None:
        labels_outside(subject)


def labels_outside(subject: CheckContext) -> None:
    """Find a label in the batch or in the data set that is none of the classes."""
    classes, labels = subject.classes or 0, _label_tensor(subject)
    batch = [] if labels is None else labels.flatten().tolist()  # sync: the batch is on the host
    data, names = subject.trainer.train_dataset, subject.trainer.label_names
    for index, label in [*((None, label) for label in batch), *labels_of(data, names, _most(data))]:
        if 0 <= label < classes or label == IGNORED_TARGET:
            continue
        where = "the first samples have" if index is None else f"sample {index} of the training data has"
        subject.inputs = None if index is None else subject.inputs
        subject.say("T405", label_outside(where, label, classes))
        return


def _label_tensor(subject: CheckContext) -> torch.Tensor | None:
    inputs = subject.inputs if isinstance(subject.inputs, Mapping) else {}
    found = next((inputs[name] for name in ("labels", *subject.trainer.label_names) if name in inputs), None)
    is_whole = isinstance(found, torch.Tensor) and not found.dtype.is_floating_point and found.dtype != torch.bool
    return found if is_whole else None


def _most(data: Any) -> int:
    return _IN_MEMORY if isinstance(data, list | tuple) else _ELSEWHERE


def check_values(subject: CheckContext) -> None:
    """Find a sample with a number that is not finite, or with an id that the model lacks, before a forward."""
    model, data = subject.trainer.model, subject.trainer.train_dataset
    rows, name = rows_of_embedding(model), main_input_name(model)
    for index, sample in scan(data, _most(data)) if subject.inputs is not None else ():
        if text := not_finite(index, sample):
            return subject.say("T409", text)
        ids = sample.get(name) if isinstance(sample, Mapping) else None
        if rows is not None and ids is not None and len(ids) and not 0 <= (most := int(max(ids))) < rows:
            subject.inputs = None  # a GPU would be lost for the other checks
            return subject.say("T514", id_outside(f"sample {index} of the training data", name, most, rows))
    return None


def check_pickling(subject: CheckContext) -> None:
    """Pickle the objects that each loading process receives with spawn or forkserver."""
    args, trainer = subject.args, subject.trainer
    workers = args.dataloader_num_workers
    # Querying the current method would fix it, and a later `set_start_method` would fail.
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    method = args.dataloader_multiprocessing_context or default
    if workers == 0 or method == "fork":
        return
    subject.progress(f"pickling the data for {workers} loading processes ({method})")
    sent = {"train_dataset": trainer.train_dataset, "data_collator": trainer.data_collator}
    sent |= {f"eval_dataset ({prefix})": dataset for prefix, dataset in subject.evaluation_sets().items()}
    for name, value in sent.items():
        try:
            with open(os.devnull, "wb") as nowhere:
                pickle.Pickler(nowhere, pickle.HIGHEST_PROTOCOL).dump(value)
        except Exception as error:  # pickle raises whatever an object's own methods raise
            if "through inheritance" in str(error):  # locks and shared values: a process may receive them at its start
                continue
            code = getattr(value, "__code__", None)
            place = type(value).__name__ if code is None else f"{value.__qualname__} of {code.co_filename}"
            subject.say(
                "T404",
                f"{name} ({place}) cannot be sent to dataloader_num_workers={workers} processes that are started by "
                f"{method}: {error!r}. Use functions and classes defined at the top of a module, open files on first "
                "use, or set dataloader_num_workers=0",
                "dataloader_num_workers",
            )
