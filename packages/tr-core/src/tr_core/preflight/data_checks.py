"""Check the training data."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import sys
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from tr_core.data.batches import Batches
from tr_core.data.loaders import is_map_style
from tr_core.data.sampler import has_length
from tr_core.data.short_runs import training_batches
from tr_core.model_io import IGNORED_TARGET, base_model, batch_size_of
from tr_core.plan import make_plan
from tr_core.preflight.context import SAMPLES, CheckContext
from tr_core.preflight.origins import last_line, raised_at
from tr_core.preflight.report import Problem
from tr_core.random_state import separate_randomness

_MOST_LEFT_OUT = 0.1
"""Share of the data that may be unused before a warning."""


def check_length(subject: CheckContext) -> Iterator[Problem]:
    """Find data that is missing, empty, or too short for a batch; record the run's steps and epochs."""
    if not subject.trains:
        return
    trainer, args, figures = subject.trainer, subject.args, subject.figures
    if trainer.train_dataset is None and not trainer.overrides("get_train_dataloader"):
        yield Problem("T401", "train_dataset is None; pass the Trainer data to train on, or do not call train")
        return
    batches = training_batches(trainer.get_train_dataloader(), args, trainer.strategy)
    try:
        plan = make_plan(args, batches)
    except ValueError as error:
        origin = subject.origin("max_steps") if batches.num_batches is None else _origin_of_no_batch(subject)
        yield Problem("T102" if batches.num_batches is None else "T101", str(error), origin)
        return
    subject.steps = figures["steps"] = plan.max_steps
    if plan.num_epochs < sys.maxsize:
        subject.epochs = figures["epochs"] = plan.num_epochs
    figures |= {"samples": batches.num_samples, "samples_per_step": plan.samples_per_step}
    yield from _left_out(subject, batches)


def _origin_of_no_batch(subject: CheckContext) -> str:
    dataset = subject.trainer.train_dataset
    is_empty = has_length(dataset) and len(dataset) == 0
    return "" if is_empty else subject.origin("dataloader_drop_last")


def _left_out(subject: CheckContext, batches: Batches) -> Iterator[Problem]:
    dataset = subject.trainer.train_dataset
    if not subject.args.dataloader_drop_last or batches.num_samples is None or not has_length(dataset):
        return
    unused = len(dataset) - batches.num_samples
    if unused > _MOST_LEFT_OUT * len(dataset):
        yield Problem(
            "T108",
            f"dataloader_drop_last=True leaves {unused} of {len(dataset)} samples out of every epoch, at "
            f"{batches.samples_per_micro_batch} samples a micro-batch; set it to False, or lower "
            "per_device_train_batch_size",
            subject.origin("dataloader_drop_last"),
        )


class ReadOnceError(Exception):
    """Reading the data would use it up."""


def check_first_batch(subject: CheckContext) -> Iterator[Problem]:
    """Load and collate a batch, and store it for later checks."""
    trainer = subject.trainer
    if not subject.trains or (trainer.train_dataset is None and not trainer.overrides("get_train_dataloader")):
        return
    subject.progress("loading two samples")
    if trainer.overrides("get_train_dataloader"):
        yield from _from_loader(subject)
        return
    batch: list[Any] = []
    yield from collate(subject, trainer.train_dataset, "training", batch)
    subject.inputs = batch[0] if batch else None


def collate(
    subject: CheckContext, dataset: Any, what: str, into: list[Any], number: int = SAMPLES
) -> Iterator[Problem]:
    """Make a batch of the first samples of a data set, as in the run, and append it to `into`."""
    with separate_randomness(subject.args.seed):
        try:
            samples = first_samples(dataset, number, may_use_up=subject.ends_here)
        except ReadOnceError:
            yield Problem("T406", f"the {what} data can be read only once: it was left alone, and the model untried")
            return
        except Exception as error:
            yield Problem("T402", f"a sample of the {what} data cannot be loaded: {last_line(error)}", raised_at(error))
            return
        if not samples:
            return
        collator = subject.trainer._get_collator_with_removed_columns(subject.trainer.data_collator)
        try:
            into.append(collator(samples))
        except Exception as error:
            yield Problem(
                "T403",
                f"{len(samples)} samples of the {what} data cannot be made a batch by {_name(collator)}: "
                f"{last_line(error)}; the first one is {_describe_batch(samples[0])}",
                raised_at(error),
            )


def first_samples(dataset: Any, number: int, *, may_use_up: bool) -> list[Any]:
    """Return copies of the first samples of a data set, so that a collator may change them.

    Raises:
        ReadOnceError: the data is an iterator, and reading it would change what training gets.
    """
    if is_map_style(dataset):
        indices = [index % len(dataset) for index in range(number)] if len(dataset) else []
        get_many = getattr(dataset, "__getitems__", None)
        samples = list(get_many(indices)) if get_many is not None else [dataset[index] for index in indices]
    else:
        iterator = iter(dataset)
        if iterator is dataset and not may_use_up:
            raise ReadOnceError
        samples = list(islice(iterator, number))
    return copy.deepcopy(samples)


def count_rows(batch: Any, start: int, stop: int) -> Any:
    """Return some rows of every tensor and list in a batch that has as many rows as the first tensor."""
    size = batch_size_of(batch)

    def cut(value: Any) -> Any:
        if hasattr(value, "shape"):
            return value[start:stop] if len(value.shape) and value.shape[0] == size else value
        if isinstance(value, Mapping):
            return {key: cut(item) for key, item in value.items()}
        if isinstance(value, tuple):
            return tuple(cut(item) for item in value)
        if isinstance(value, list):
            return value[start:stop] if len(value) == size and not _holds_tensors(value) else [cut(v) for v in value]
        return value

    return cut(batch)


def _holds_tensors(values: list[Any]) -> bool:
    return any(hasattr(value, "shape") for value in values)


def _from_loader(subject: CheckContext) -> Iterator[Problem]:
    loader = subject.trainer.get_train_dataloader()
    try:
        iterator = iter(loader)
        if iterator is loader and not subject.ends_here:
            yield Problem("T406", "the training data can be read only once: it was left alone, and the model untried")
            return
        batch = next(iterator, None)
    except Exception as error:
        yield Problem("T402", f"the loader of the training data fails: {last_line(error)}", raised_at(error))
        return
    if batch is not None:
        subject.inputs = count_rows(batch, 0, SAMPLES)


def _name(collator: Any) -> str:
    return getattr(collator, "__qualname__", type(collator).__name__)


def _describe_batch(sample: Any) -> str:
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{key!r}: {_shape(value)}" for key, value in sample.items()) + "}"
    if isinstance(sample, list | tuple):
        return f"a {type(sample).__name__} of " + ", ".join(map(_shape, sample[:8]))
    return _shape(sample)


def _shape(value: Any) -> str:
    kind = type(value).__name__
    if hasattr(value, "shape"):
        return f"{kind} {tuple(value.shape)}"
    return f"{kind} of {len(value)}" if hasattr(value, "__len__") else kind


_IN_MEMORY, _ELSEWHERE = 10_000, 64
"""Samples whose labels are read: many from a list, few if each sample may need decoding."""


def check_labels(subject: CheckContext) -> Iterator[Problem]:
    """Compare labels with the number of classes in the model's configuration, before a forward."""
    if subject.inputs is not None:
        subject.classes = _configured_classes(subject)
        yield from labels_outside(subject)


def labels_outside(subject: CheckContext) -> Iterator[Problem]:
    """Find labels in the batch and in the data set that are no class; none if the number of classes is unknown."""
    classes = subject.classes
    if classes is None:
        return
    labels = [label for label in _of_batch(subject) if not 0 <= label < classes and label != IGNORED_TARGET]
    bad = [(None, label) for label in labels]
    found = bad or [(i, v) for i, v in _of_data(subject) if not 0 <= v < classes and v != IGNORED_TARGET]
    if found:
        index, label = found[0]
        where = "the first samples" if index is None else f"sample {index} of the training data"
        subject.inputs = None if bad else subject.inputs
        yield Problem(
            "T405",
            f"{where} has the label {label}, but the model has {classes} classes: labels are whole numbers from 0 to "
            f"{classes - 1}, or {IGNORED_TARGET} for none; give the model more classes (num_labels), or number the "
            "labels from 0",
        )


def _configured_classes(subject: CheckContext) -> int | None:
    model = base_model(subject.trainer.model)
    config = getattr(model, "config", None)
    labels = _label_tensor(subject)
    if config is None or labels is None or getattr(config, "problem_type", None) == "regression":
        return None
    per_sample = labels.dim() == 1 or "TokenClassification" in type(model).__name__
    number = getattr(config, "num_labels" if per_sample else "vocab_size", None)
    return number if isinstance(number, int) and number > 1 else None  # one class is a regression


def _label_tensor(subject: CheckContext) -> torch.Tensor | None:
    inputs = subject.inputs
    if not isinstance(inputs, Mapping):
        return None
    found = next((inputs[name] for name in ("labels", *subject.trainer.label_names) if name in inputs), None)
    is_whole = isinstance(found, torch.Tensor) and not found.dtype.is_floating_point and found.dtype != torch.bool
    return found if is_whole else None


def _of_batch(subject: CheckContext) -> list[int]:
    labels = _label_tensor(subject)
    return [] if labels is None else labels.flatten().tolist()  # sync: the batch is on the host


def _of_data(subject: CheckContext) -> Iterator[tuple[int, int]]:
    dataset = subject.trainer.train_dataset
    if dataset is None or isinstance(dataset, dict) or not is_map_style(dataset):
        return
    limit = _IN_MEMORY if isinstance(dataset, list | tuple) else _ELSEWHERE
    for index in range(0, len(dataset), max(len(dataset) // limit, 1)):
        label = _label_of(dataset[index], subject.trainer.label_names)
        if label is not None:
            yield index, label


def _label_of(sample: Any, names: list[str]) -> int | None:
    if not isinstance(sample, Mapping):
        return None
    value = next((sample[name] for name in ("labels", "label", "label_ids", *names) if name in sample), None)
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.dtype.is_floating_point:
        value = int(value)  # sync: a sample is on the host
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class _Sink(io.RawIOBase):
    """Counts bytes without storing them: a data set may be large."""

    size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        length = memoryview(data).nbytes
        self.size += length
        return length


def check_pickling(subject: CheckContext) -> Iterator[Problem]:
    """Pickle the objects that each loading process receives with spawn or forkserver."""
    args, trainer = subject.args, subject.trainer
    workers = args.dataloader_num_workers
    method = args.dataloader_multiprocessing_context or _default_method()
    if workers == 0 or method == "fork":
        return
    subject.progress(f"pickling the data for {workers} loading processes ({method})")
    sent = {"train_dataset": trainer.train_dataset, "data_collator": trainer.data_collator}
    sent |= {f"eval_dataset ({prefix})": dataset for prefix, dataset in subject.evaluation_sets().items()}
    sizes = {}
    for name, value in sent.items():
        try:
            sizes[name] = pickled_bytes(value)
        except Exception as error:  # pickle raises whatever an object's own methods raise
            if "through inheritance" in str(error):  # locks and shared values: a process may receive them at its start
                continue
            yield Problem(
                "T404",
                f"{name} ({_describe(value)}) cannot be sent to dataloader_num_workers={workers} processes that are "
                f"started by {method}: {last_line(error)}. Use functions and classes defined at the top of a module, "
                "open files on first use, or set dataloader_num_workers=0",
                subject.origin("dataloader_num_workers"),
            )
    subject.figures |= {"workers": workers, "worker_bytes": sizes.get("train_dataset", 0)}


def _default_method() -> str:
    # Querying the current method would fix it, and a later `set_start_method` would fail.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def pickled_bytes(value: Any) -> int:
    """Return the size of `value` pickled, without storing the bytes.

    Raises:
        Exception: the value cannot be pickled.
    """
    sink = _Sink()
    buffered = io.BufferedWriter(sink)
    pickle.Pickler(buffered, pickle.HIGHEST_PROTOCOL).dump(value)
    buffered.flush()
    return sink.size


def _describe(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    code = getattr(value, "__code__", None)
    if name is None or code is None:
        return type(value).__name__
    return f"{name} of {code.co_filename}:{code.co_firstlineno}"
