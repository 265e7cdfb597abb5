"""Look whether labels name classes that the model has: one that does not ends a run on a GPU without a message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tr_core.data.loaders import is_map_style
from tr_core.losses.targets import IGNORED_TARGET
from tr_core.model_io import base_model
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject

_IN_MEMORY, _ELSEWHERE = 10_000, 64
"""Samples whose labels are read: many of a list, few where each one may have to be decoded."""


def check_labels(subject: Subject) -> Iterator[Problem]:
    """Compare labels with the number of classes in the model's configuration, before anything is computed."""
    if subject.inputs is not None:
        subject.classes = _configured_classes(subject)
        yield from labels_outside(subject)


def labels_outside(subject: Subject) -> Iterator[Problem]:
    """Find labels in the batch and in the data set that are no class; where the number of classes is unknown, none."""
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


def _configured_classes(subject: Subject) -> int | None:
    model = base_model(subject.trainer.model)
    config = getattr(model, "config", None)
    labels = _label_tensor(subject)
    if config is None or labels is None or getattr(config, "problem_type", None) == "regression":
        return None
    per_sample = labels.dim() == 1 or "TokenClassification" in type(model).__name__
    number = getattr(config, "num_labels" if per_sample else "vocab_size", None)
    return number if isinstance(number, int) and number > 1 else None  # one class is a regression


def _label_tensor(subject: Subject) -> torch.Tensor | None:
    inputs = subject.inputs
    if not isinstance(inputs, Mapping):
        return None
    found = next((inputs[name] for name in ("labels", *subject.trainer.label_names) if name in inputs), None)
    is_whole = isinstance(found, torch.Tensor) and not found.dtype.is_floating_point and found.dtype != torch.bool
    return found if is_whole else None


def _of_batch(subject: Subject) -> list[int]:
    labels = _label_tensor(subject)
    return [] if labels is None else labels.flatten().tolist()  # sync: the batch is on the host


def _of_data(subject: Subject) -> Iterator[tuple[int, int]]:
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
