"""Say what is wrong with a micro-batch that cannot be made, or whose forward, loss or backward failed, and what to do.

`trainer check` and a run ask the same table. A good step costs nothing: the loop declares which micro-batch it computes
(`StepScope.inputs`), and the rest is what the exception holds: the arguments of the function of torch
that it came through.
"""

from __future__ import annotations

import multiprocessing.reduction
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any

import torch
from torch.nn import functional

from tr_core.data.loaders import is_map_style
from tr_core.loss import split_loss
from tr_core.model_io import IGNORED_TARGET, base_model, loss_of, main_input_name
from tr_core.runtime.memory import is_out_of_memory
from tr_core.signatures import parameters_of
from tr_core.trainer_methods import TrainerMethods

_LONGEST_SEARCH_S = 20.0


@dataclass
class Failure:
    """An exception, the Trainer whose micro-batch it stopped, and the data that the micro-batch is of."""

    error: Exception
    trainer: TrainerMethods
    data: Any

    def local(self, function: Any, name: str) -> Any:
        """Return a variable of the deepest call of a function that the exception came through; None without one."""
        frames = [frame for frame, _ in traceback.walk_tb(self.error.__traceback__)]
        found = [frame.f_locals for frame in frames if frame.f_code is function.__code__]
        return found[-1].get(name) if found else None

    @property
    def inputs(self) -> Any:
        """The micro-batch as the loader gave it, on the host, if its forward, loss or backward failed; else None."""
        return self.trainer.scope.inputs

    @property
    def trains(self) -> bool:
        """Whether the data is that of training."""
        return self.data is self.trainer.train_dataset

    @property
    def loss(self) -> torch.Tensor | None:
        """The loss whose backward failed; None if anything else did."""
        given = self.local(torch.autograd.backward, "tensors")
        return given[0] if isinstance(given, tuple) else given

    @cached_property
    def lost_device(self) -> bool:
        """Whether the device does not answer any more, as a GPU after a wrong index: then no place is known."""
        device = self.trainer.strategy.device
        module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        try:
            if hasattr(module, "current_stream"):
                module.current_stream(device).query()  # no sync: other ranks may never come
        except RuntimeError:
            return True
        return False

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors of the micro-batch by their columns."""
        inputs = self.inputs if isinstance(self.inputs, Mapping) else {}
        return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}

    @property
    def columns(self) -> Any:
        """The columns of the batch; its type where it has none."""
        return sorted(map(str, self.inputs)) if isinstance(self.inputs, Mapping) else type(self.inputs).__name__

    @property
    def left_out(self) -> str:
        """What to add of columns that the samples have and the micro-batch lacks."""
        first = next((sample for _, sample in scan(self.data, 1) if isinstance(sample, Mapping)), {})
        if not (hidden := sorted(set(map(str, first)) - set(map(str, self.inputs)))):
            return ""
        return (
            f"; columns {hidden} of the data were left out, as they are text, or the model's forward takes none of "
            "these names: tokenize or rename them"
        )


def scan(data: Any, most: int) -> Iterator[tuple[int, Any]]:
    """Yield up to so many samples of map-style data, spread evenly, with their indices, for some seconds at most."""
    end_s = monotonic() + _LONGEST_SEARCH_S
    if data is not None and not isinstance(data, dict) and is_map_style(data):
        for index in range(0, len(data), max(len(data) // most, 1)):
            if monotonic() > end_s:
                return
            yield index, data[index]


def explain(error: Exception, trainer: TrainerMethods, data: Any) -> None:
    """Add to an exception what is wrong with its micro-batch and what to do, as a note; its type and text stay."""
    with suppress(Exception):  # what is looked at may fail itself, as a device after an error
        failure = Failure(error, trainer, trainer.eval_dataset[data] if isinstance(data, str) else data)
        _, text = diagnose(failure) or ("", _contents(failure))
        if text:
            error.add_note(text)
    trainer.scope.inputs = None  # what surrounds an evaluation does not explain its error again


def _contents(failure: Failure) -> str:
    shown = [f"{name} {_dtype(value)} {tuple(value.shape)}" for name, value in failure.tensors.items()]
    return f"the micro-batch holds {', '.join(shown)}" if shown else ""


def diagnose(failure: Failure) -> tuple[str, str] | None:
    """Return the code and the words of the first row that fits a failure; None if none does.

    An error of other origin, as of a callback, has no row: the data would be read for nothing.
    """
    rows = _OF_A_BATCH if failure.inputs is not None else _OF_OTHERS
    found = ((code, says(failure)) for code, says in rows)
    return next(((code, text) for code, text in found if text), None)


def _out_of_memory(failure: Failure) -> str | None:
    args = failure.trainer.args
    if args.auto_find_batch_size or not is_out_of_memory(failure.error):
        return None
    if not failure.trains:
        return (
            f"memory ran out in an evaluation with per_device_eval_batch_size={args.per_device_eval_batch_size}: lower "
            "it, and set eval_accumulation_steps=1, so that predictions leave the device"
        )
    size, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    now = f"memory ran out with per_device_train_batch_size={size} and gradient_accumulation_steps={steps}"
    less = size // 2 if size % 2 == 0 else 1
    smaller = f"set them to {less} and {steps * size // less}, which keeps the samples of a step, or "
    on = " is on already" if args.gradient_checkpointing else "=True"
    return (
        f"{now}: {smaller if size > 1 else ''}auto_find_batch_size=True; gradient_checkpointing{on}; shorter samples "
        "need less too"
    )


def _outside(values: torch.Tensor, limit: int, ignored: int = 0) -> tuple[int, int] | None:
    """Return row and value of the first number that is none of 0 to `limit` - 1, nor ignored; None without one."""
    values = values.cpu()
    is_bad = ((values < 0) | (values >= limit)) & (values != ignored)
    return (int(is_bad.nonzero()[0][0]), int(values[is_bad][0])) if is_bad.any() else None


def _outside_of_embedding(failure: Failure) -> str | None:
    ids, weight = failure.local(functional.embedding, "input"), failure.local(functional.embedding, "weight")
    rows = None if weight is None else len(weight)
    if failure.lost_device:
        model = failure.trainer.model
        ids, rows = failure.tensors.get(main_input_name(model)), rows_of_embedding(model)
    if rows is None or ids is None or (found := _outside(ids, rows)) is None:
        return None
    row, value = found
    for name, column in failure.tensors.items():
        if torch.equal(column.cpu(), ids.cpu()):
            return id_outside(f"sample {row} of the micro-batch", name, value, rows)
    return (
        f"an embedding of {rows} rows has no row {value}, and no column of the batch holds that number: if it is one "
        f"of positions, samples are too long for the model; truncate them to {rows}"
    )


def rows_of_embedding(model: Any) -> int | None:
    """Return how many ids the embedding of a model of transformers has; None if unknown."""
    inner: Any = base_model(model)
    embedding = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    return getattr(embedding, "num_embeddings", None)


def classes_of(model: Any, labels: torch.Tensor) -> int | None:
    """Return the number of classes in a model's configuration; None if unknown, or for a regression."""
    model = base_model(model)
    config = getattr(model, "config", None)
    per_sample = labels.dim() == 1 or "TokenClassification" in type(model).__name__
    number = getattr(config, "num_labels" if per_sample else "vocab_size", None)
    is_known = isinstance(number, int) and number > 1 and getattr(config, "problem_type", None) != "regression"
    return number if is_known else None


def id_outside(where: str, name: str, value: int, rows: int) -> str:
    """Return what is wrong with an id, and what to do."""
    return (
        f"column {name!r} of {where} holds the id {value}, but the model's embedding has {rows} rows, for ids from 0 "
        f"to {rows - 1}: use the tokenizer of this model, or make room with "
        "model.resize_token_embeddings(len(tokenizer))"
    )


def _labels(failure: Failure) -> tuple[Any, Any]:
    """Return what a cross entropy compared: the labels, and its scores of the classes."""
    for function in (functional.cross_entropy, functional.binary_cross_entropy_with_logits, functional.nll_loss):
        labels, scores = failure.local(function, "target"), failure.local(function, "input")
        if isinstance(labels, torch.Tensor) and isinstance(scores, torch.Tensor):
            return labels, scores
    return None, None


def _no_class_numbers(failure: Failure) -> str | None:
    labels, scores = _labels(failure)
    if labels is None or labels.is_floating_point() == (labels.shape == scores.shape):
        return None
    if labels.is_floating_point():
        return (
            f"the labels are {_dtype(labels)}, and a cross entropy takes class numbers: make them whole numbers "
            "(int64), from 0 on; for a regression, give the model one output (num_labels=1)"
        )
    return (
        f"the labels are whole numbers of the shape {tuple(labels.shape)}, one for each class: give each sample the "
        "number of its class, or make them float32 for probabilities"
    )


def _outside_of_classes(failure: Failure) -> str | None:
    names, (labels, scores) = failure.trainer.label_names, _labels(failure)
    columns = [failure.tensors[name] for name in names if name in failure.tensors]
    classes = None if scores is None else scores.shape[min(1, scores.dim() - 1)]
    if failure.lost_device and columns:
        labels, classes = columns[0], classes_of(failure.trainer.model, columns[0])
    if classes is None or labels.is_floating_point():
        return None
    ignored = failure.local(functional.cross_entropy, "ignore_index")
    found = _outside(labels, classes, IGNORED_TARGET if ignored is None else ignored)
    if found is None:
        return None
    kind = "training" if failure.trains else "evaluation"
    index = next((index for index, label in labels_of(failure.data, names) if label == found[1]), None)
    where = "a sample of the micro-batch has" if index is None else f"sample {index} of the {kind} data has"
    return label_outside(where, found[1], classes)


def label_outside(where: str, label: Any, classes: int) -> str:
    """Return what is wrong with a label, and what to do."""
    return (
        f"{where} the label {label}, but the model has {classes} classes: labels are whole numbers from 0 to "
        f"{classes - 1}, or {IGNORED_TARGET} for none; give the model more classes (num_labels), or number the labels "
        "from 0"
    )


def labels_of(data: Any, names: list[str], most: int = 10_000) -> Iterator[tuple[int, int]]:
    """Yield index and label of samples with one label each."""
    for index, sample in scan(data, most):
        keys = ("labels", "label", "label_ids", *names)
        value: Any = next((sample[key] for key in keys if key in sample), None) if isinstance(sample, Mapping) else None
        if hasattr(value, "tolist"):
            value = value.tolist()  # a sample is on the host
        if isinstance(value, int) and not isinstance(value, bool):
            yield index, value


def _not_sent(failure: Failure) -> str | None:
    if failure.local(multiprocessing.reduction.dump, "obj") is None:
        return None
    return (
        f"the data set, or the data collator, cannot be sent to the {failure.trainer.args.dataloader_num_workers} "
        "processes of dataloader_num_workers: use functions and classes defined at the top of a module, open files on "
        "first use, or set dataloader_num_workers=0"
    )


def _missing_columns(failure: Failure) -> str | None:
    is_by_override = failure.trainer.overrides("compute_loss", "training_step", "prediction_step")
    if is_by_override or not isinstance(failure.inputs, Mapping):
        return None  # which may give the model other names
    model = base_model(failure.trainer.model)
    takes = parameters_of(model.forward)
    needed = {name for name, each in takes.items() if each.default is each.empty and each.kind not in (2, 4)}
    if failure.left_out:  # one that is optional beside others, as embeddings
        needed |= {main_input_name(model)} & set(takes)
    missing = sorted(needed - set(failure.inputs))
    if not missing:
        return None
    return (
        f"the forward method of {type(model).__name__} needs {', '.join(missing)}, and the micro-batch has "
        f"{failure.columns}{failure.left_out}"
    )


def _unfit_for_weights(failure: Failure) -> str | None:
    forward = torch.nn.Linear.forward
    layer, given = failure.local(forward, "self"), failure.local(forward, "input")
    if not isinstance(given, torch.Tensor) or given.dim() == 0:
        return None
    if given.shape[-1] == layer.in_features and given.dtype == layer.weight.dtype:
        return None
    return (
        f"{layer} takes {_dtype(layer.weight)} with {layer.in_features} numbers in the last dimension, and was given "
        f"{_dtype(given)} of the shape {tuple(given.shape)}; make that fit in the data set or the collator: "
        f"{_contents(failure)}"
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _not_one_number(failure: Failure) -> str | None:
    if failure.loss is None or failure.loss.dim() == 0:
        return None
    shape = tuple(failure.loss.shape)
    return f"the loss has the shape {shape}; it must be one number: take the mean over samples or targets"


def _without_gradient(failure: Failure) -> str | None:
    if failure.loss is None or failure.loss.requires_grad:
        return None
    return (
        "the loss does not depend on any trainable parameter: it was computed without gradients (no_grad, detach, "
        ".item()) or from frozen parts alone; compute it from the model's outputs as they are"
    )


def _no_loss(failure: Failure) -> str | None:
    names, inputs = failure.trainer.label_names, failure.inputs
    is_refused = any(failure.local(function, name) is not None for function, name in _READS_LOSS)
    is_by_override = failure.trainer.overrides("compute_loss", "training_step")
    if failure.loss is not None or (is_by_override and not is_refused):
        return None
    if names and isinstance(inputs, Mapping) and not set(names) & set(inputs):
        return f"the model gives no loss: no {' or '.join(names)} among {failure.columns}{failure.left_out}"
    return f"the model gives no loss: the batch has {failure.columns}" if is_refused else None


_READS_LOSS = ((loss_of, "outputs"), (split_loss, "returned"))


def _not_finite(failure: Failure) -> str | None:
    if not isinstance(failure.error, FloatingPointError):
        return None
    return next((text for index, sample in scan(failure.data, 100_000) if (text := not_finite(index, sample))), None)


def not_finite(index: int, sample: Any) -> str | None:
    """Return what is wrong with a sample that holds a number which is not finite."""
    for name, value in sample.items() if isinstance(sample, Mapping) else ():
        with suppress(TypeError, ValueError, RuntimeError):  # no numbers, or rows of unequal length
            numbers = torch.as_tensor(value)
            if numbers.is_floating_point() and not (good := numbers.isfinite()).all():
                bad = numbers[~good].flatten()[0].item()
                return (
                    f"column {name!r} of sample {index} holds {bad}: fill in or leave out what is missing in the data"
                )
    return None


_Rows = tuple[tuple[str, Callable[[Failure], str | None]], ...]
_OF_A_BATCH: _Rows = (
    ("T306", _out_of_memory),
    ("T504", _not_one_number),
    ("T505", _without_gradient),
    ("T514", _outside_of_embedding),
    ("T408", _no_class_numbers),
    ("T405", _outside_of_classes),
    ("T502", _missing_columns),
    ("T502", _unfit_for_weights),
    ("T503", _no_loss),
)
_OF_OTHERS: _Rows = (("T404", _not_sent), ("T409", _not_finite))
