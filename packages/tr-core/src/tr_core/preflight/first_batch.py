"""Load two training samples and make them a batch."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tr_core.checks import overrides_loader
from tr_core.data.loaders import is_map_style
from tr_core.model_io import batch_size_of
from tr_core.preflight.raised import last_line, place
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import SAMPLES, Subject
from tr_core.randomness import separate_randomness


class ReadOnceError(Exception):
    """Reading the data would use it up."""


def check_first_batch(subject: Subject) -> Iterator[Problem]:
    """Load and collate; the batch is for the checks that follow."""
    trainer = subject.trainer
    if not subject.trains or (trainer.train_dataset is None and not overrides_loader(trainer)):
        return
    subject.progress("loading two samples")
    if overrides_loader(trainer):
        yield from _from_loader(subject)
        return
    batch: list[Any] = []
    yield from collate(subject, trainer.train_dataset, "training", batch)
    subject.inputs = batch[0] if batch else None


def collate(subject: Subject, dataset: Any, what: str, into: list[Any], number: int = SAMPLES) -> Iterator[Problem]:
    """Make a batch of the first samples of a data set, as one of the run, and append it to `into`.

    Args:
        subject: what is examined.
        dataset: the data.
        what: `training` or `evaluation`, for messages.
        into: gets the batch, if there is one.
        number: samples to take; a data set with fewer gives its own again, from the first.
    """
    with separate_randomness(subject.args.seed):
        try:
            samples = first_samples(dataset, number, may_use_up=subject.ends_here)
        except ReadOnceError:
            yield Problem("T406", f"the {what} data can be read only once: it was left alone, and the model untried")
            return
        except Exception as error:
            yield Problem("T402", f"a sample of the {what} data cannot be loaded: {last_line(error)}", place(error))
            return
        if not samples:
            return
        collator = subject.trainer._collator()
        try:
            into.append(collator(samples))
        except Exception as error:
            yield Problem(
                "T403",
                f"{len(samples)} samples of the {what} data cannot be made a batch by {_name(collator)}: "
                f"{last_line(error)}; the first one is {_describe(samples[0])}",
                place(error),
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


def rows(batch: Any, start: int, stop: int) -> Any:
    """Return some rows of a batch: of every tensor and list that has as many rows as the first tensor."""
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


def _from_loader(subject: Subject) -> Iterator[Problem]:
    loader = subject.trainer.get_train_dataloader()
    try:
        iterator = iter(loader)
        if iterator is loader and not subject.ends_here:
            yield Problem("T406", "the training data can be read only once: it was left alone, and the model untried")
            return
        batch = next(iterator, None)
    except Exception as error:
        yield Problem("T402", f"the loader of the training data fails: {last_line(error)}", place(error))
        return
    if batch is not None:
        subject.inputs = rows(batch, 0, SAMPLES)


def _name(collator: Any) -> str:
    return getattr(collator, "__qualname__", type(collator).__name__)


def _describe(sample: Any) -> str:
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
