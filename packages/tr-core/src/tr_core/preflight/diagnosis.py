"""Say what is wrong with a micro-batch that cannot be made, or whose forward, loss or backward failed, and what to do.

`trainer check` and a run ask the same table. A good step costs nothing: all that is looked at, the exception has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from time import monotonic
from typing import Any

import torch

from tr_core.collators.padding import default_data_collator
from tr_core.data.loaders import is_map_style
from tr_core.model_io import IGNORED_TARGET, base_model, main_input_name
from tr_core.preflight.origins import frames_of, passed_through
from tr_core.runtime.memory import is_out_of_memory
from tr_core.signatures import parameters_of
from tr_core.trainer_methods import TrainerMethods

_LONGEST_SEARCH_S = 20.0
_MAKES_BATCHES = ("_collated", "_samples", "collate", "read_samples", "reraise")
_COMPUTES = ("training_step", "prediction_step")


@dataclass
class Failure:
    """An exception, and the Trainer whose micro-batch it stopped."""

    error: Exception
    trainer: TrainerMethods

    def local(self, function: str, name: str) -> Any:
        """Return a variable of the deepest call of a function that the exception came through; None without one."""
        found = [frame.f_locals for frame in frames_of(self.error) if frame.f_code.co_name == function]
        return found[-1].get(name) if found else None

    @property
    def computes(self) -> bool:
        """Whether forward, loss or backward of a micro-batch failed."""
        return passed_through(self.error, *_COMPUTES)

    @property
    def is_of_loader(self) -> bool:
        """Whether a micro-batch could not be read or made."""
        return passed_through(self.error, *_MAKES_BATCHES)

    @property
    def lost_device(self) -> bool:
        """Whether an index was wrong on a GPU: nothing on it can be read any more, and the place is not known."""
        return self.computes and "device-side assert" in str(self.error)

    @property
    def inputs(self) -> Any:
        """The micro-batch as the loader gave it, on the host; None if it was not made."""
        batch = self.local("train_step", "batch") or self.local("_one_batch", "batch")
        inputs = self.local("micro_batches", "piece") if batch is None else batch.inputs
        return inputs if self.computes else None

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
    def data(self) -> Any:
        """The data that the micro-batch is of."""
        own = self.trainer.eval_dataset if passed_through(self.error, "evaluate") else self.trainer.train_dataset
        given = (("predict", "test_dataset"), ("evaluate", "chosen"), ("_evaluate", "dataset"), ("collate", "dataset"))
        data = next((data for place in given if (data := self.local(*place)) is not None), own)
        return self.trainer.eval_dataset[data] if isinstance(data, str) else data

    @cached_property
    def samples(self) -> list[Any]:
        """The samples that cannot be made a batch, or the first one of the data."""
        for function in ("_collated", "collate"):
            if found := self.local(function, "samples") or self.local(function, "read"):
                return found
        with suppress(Exception):
            return [sample for _, sample in scan(self.data, 1)]
        return []


def scan(data: Any, most: int) -> Iterator[tuple[int, Any]]:
    """Yield up to so many samples of map-style data, spread evenly, with their indices, for some seconds at most."""
    end_s = monotonic() + _LONGEST_SEARCH_S
    if data is not None and not isinstance(data, dict) and is_map_style(data):
        for index in range(0, len(data), max(len(data) // most, 1)):
            if monotonic() > end_s:
                return
            yield index, data[index]


def explain(error: Exception, trainer: TrainerMethods) -> None:
    """Add to an exception what is wrong with its micro-batch and what to do, as a note; its type and text stay."""
    with suppress(Exception):  # what is looked at may fail itself, as a device after an error
        failure = Failure(error, trainer)
        _, text = diagnose(failure) or ("", _contents(failure))
        if text and text not in getattr(error, "__notes__", ()):
            error.add_note(text)


def _contents(failure: Failure) -> str:
    shown = [f"{name} {_dtype(value)} {tuple(value.shape)}" for name, value in failure.tensors.items()]
    return f"the micro-batch holds {', '.join(shown)}" if shown else ""


def diagnose(failure: Failure) -> tuple[str, str] | None:
    """Return the code and the words of the first row that fits a failure; None if none does.

    An error of other origin, as of a callback, has no row: the data would be read for nothing.
    """
    if not (failure.computes or failure.is_of_loader or isinstance(failure.error, FloatingPointError)):
        return None
    found = ((code, says(failure)) for code, says in _TABLE)
    return next(((code, text) for code, text in found if text), None)


def _out_of_memory(failure: Failure) -> str | None:
    args = failure.trainer.args
    if not is_out_of_memory(failure.error) or not failure.computes or args.auto_find_batch_size:
        return None
    if not passed_through(failure.error, "training_step"):
        size = args.per_device_eval_batch_size
        return (
            f"memory ran out in an evaluation with per_device_eval_batch_size={size}: lower it, and set "
            "eval_accumulation_steps=1, so that predictions leave the device"
        )
    size, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    now = f"memory ran out with per_device_train_batch_size={size} and gradient_accumulation_steps={steps}"
    less = f"set them to {size // 2} and {steps * 2}, which keeps the samples of a step, or auto_find_batch_size=True"
    smaller = less if size > 1 and size % 2 == 0 else "lower the first" if size > 1 else "a micro-batch is one sample"
    on = "is on already" if args.gradient_checkpointing else "=True"
    return f"{now}: {smaller}; gradient_checkpointing{' ' * (on[0] == 'i')}{on}; shorter samples need less too"


def _outside_of_embedding(failure: Failure) -> str | None:
    ids, weight = failure.local("embedding", "input"), failure.local("embedding", "weight")
    if failure.lost_device:
        name, rows = main_input_name(failure.trainer.model), rows_of_embedding(failure.trainer.model)
        ids = failure.tensors.get(name)
    else:
        name, rows = "", None if weight is None else len(weight)
    if rows is None or ids is None or ids.is_floating_point():
        return None
    ids = ids.cpu()
    outside = (ids < 0) | (ids >= rows)
    if not outside.any():
        return None
    value = int(ids[outside][0])
    name = name or next((name for name, column in failure.tensors.items() if torch.equal(column.cpu(), ids)), "")
    if not name:
        return (
            f"an embedding of {rows} rows has no row {value}, and no column of the batch holds that number: if it is "
            f"one of positions, samples are too long for the model; truncate them to {rows}"
        )
    return id_outside(f"sample {outside.nonzero()[0][0].item()} of the micro-batch", name, value, rows)


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
    for function in ("cross_entropy", "binary_cross_entropy_with_logits", "nll_loss"):
        labels, scores = failure.local(function, "target"), failure.local(function, "input")
        if isinstance(labels, torch.Tensor) and isinstance(scores, torch.Tensor):
            return labels, scores
    return None, None


def _fractions_as_labels(failure: Failure) -> str | None:
    labels, scores = _labels(failure)
    if labels is None or not labels.is_floating_point() or labels.shape == scores.shape:
        return None
    return (
        f"the labels are {_dtype(labels)}, and a cross entropy takes class numbers: make "
        "them whole numbers (int64), from 0 on; for a regression, give the model one output (num_labels=1)"
    )


def _numbers_for_each_class(failure: Failure) -> str | None:
    labels, scores = _labels(failure)
    if labels is None or labels.is_floating_point() or labels.dim() < 2 or labels.shape != scores.shape:
        return None
    return (
        f"the labels are whole numbers of the shape {tuple(labels.shape)}, one for each class: give each sample the "
        "number of its class, or make them float32 for probabilities"
    )


def _outside_of_classes(failure: Failure) -> str | None:
    names, (labels, scores) = failure.trainer.label_names, _labels(failure)
    columns = [failure.tensors[name].cpu() for name in names if name in failure.tensors]
    classes = None if scores is None or scores.dim() < 1 else scores.shape[min(1, scores.dim() - 1)]
    if failure.lost_device:
        labels = next(iter(columns), None)
        classes = None if labels is None else classes_of(failure.trainer.model, labels)
    if classes is None or labels is None or labels.is_floating_point():
        return None
    ignored = failure.local("cross_entropy", "ignore_index")
    bad = labels[((labels < 0) | (labels >= classes)) & (labels != (IGNORED_TARGET if ignored is None else ignored))]
    if not len(bad):
        return None
    label = bad[0].item()
    kind = "training" if failure.data is failure.trainer.train_dataset else "evaluation"
    for index, found in labels_of(failure.data, names):
        if found == label:
            return label_outside(f"sample {index} of the {kind} data has", label, classes)
    row = next((str((column == label).nonzero()[0][0].item()) for column in columns if (column == label).any()), "")
    return label_outside(f"sample {row} of the micro-batch has" if row else "a sample has", label, classes)


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


def _no_samples(failure: Failure) -> str | None:
    data = failure.data
    if hasattr(data, "iloc") and failure.is_of_loader:
        return (
            f"the data set is a {type(data).__name__}, whose [0] is a column and no sample: give its rows, as "
            "datasets.Dataset.from_pandas(frame) or frame.to_dict('records')"
        )
    first = next(iter(failure.samples), None)
    if not isinstance(first, str) or not (failure.computes or failure.is_of_loader):
        return None
    return (
        f"the data set holds strings such as {first[:40]!r}, and a sample is a mapping of columns: tokenize them "
        "first, for example with [tokenizer(text, truncation=True) for text in texts]"
    )


def _unequal_samples(failure: Failure) -> str | None:
    samples = [sample for sample in failure.samples if isinstance(sample, Mapping)]
    stacks = failure.trainer.data_collator in (default_data_collator, torch.utils.data.default_collate)
    if not failure.is_of_loader or not stacks or len(samples) < 2:
        return None  # another collator may well take them
    for name in samples[0]:
        sizes = [size for sample in samples if (size := _size(sample.get(name))) is not None]
        if len(set(sizes)) > 1:
            return (
                f"column {name!r} has {min(sizes)} values in one sample and {max(sizes)} in another: bring all to one "
                "length, or pass a data_collator that pads, as DataCollatorWithPadding does"
            )
    return None


def _size(value: Any) -> int | None:
    """Return the length of a row of numbers; None for anything else."""
    if isinstance(value, torch.Tensor):
        return len(value) if value.dim() else None
    return len(value) if isinstance(value, list | tuple) and not _is_text(value) else None


def _missing_columns(failure: Failure) -> str | None:
    if not isinstance(failure.error, TypeError) or not isinstance(failure.inputs, Mapping):
        return None
    if failure.trainer.overrides("compute_loss", "training_step", "prediction_step"):
        return None  # which may give the model other names
    model = base_model(failure.trainer.model)
    missing = sorted(_needed(model) - set(failure.inputs))
    if not missing:
        return None
    first = next((sample for sample in failure.samples if isinstance(sample, Mapping)), {})
    hidden = sorted(set(map(str, first)) - set(map(str, failure.inputs)))
    left_out = f"; columns {hidden} of the data were left out, as it takes none of these names: rename them"
    return (
        f"the forward method of {type(model).__name__} needs {', '.join(missing)}, and the micro-batch has "
        f"{failure.columns}{left_out if hidden else ''}"
    )


def _unfit_for_weights(failure: Failure) -> str | None:
    layer, given = failure.local("forward", "self"), failure.local("forward", "input")
    if not isinstance(layer, torch.nn.Linear) or not isinstance(given, torch.Tensor) or given.dim() == 0:
        return None
    if given.shape[-1] != layer.in_features:
        return (
            f"{layer} takes {layer.in_features} numbers in the last dimension, and was given the shape "
            f"{tuple(given.shape)}; {_contents(failure)}"
        )
    if given.dtype == layer.weight.dtype:
        return None
    same = [name for name, value in failure.tensors.items() if (value.dtype, value.shape) == (given.dtype, given.shape)]
    column = f", as column {same[0]!r} is" if same else ""
    return (
        f"{layer} has weights of {_dtype(layer.weight)} and was given {_dtype(given)}{column}: make that "
        f"{_dtype(layer.weight)} in the data set or the collator"
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _needed(model: Any) -> set[str]:
    takes = parameters_of(model.forward)
    return {name for name, each in takes.items() if each.default is each.empty and each.kind not in (2, 4)}


def _text(failure: Failure) -> str | None:
    inputs, first = failure.inputs, next(iter(failure.samples), None)
    collator = failure.trainer.data_collator
    is_own = getattr(collator, "__module__", type(collator).__module__).partition(".")[0] in ("tr_core", "transformers")
    if not isinstance(first, Mapping) or not (inputs is not None or failure.is_of_loader):
        return None
    given = inputs if inputs is not None else first
    words = [name for name, value in first.items() if _is_text(value) and name not in failure.trainer.label_names]
    takes = parameters_of(base_model(failure.trainer.model).forward)
    needed = _needed(base_model(failure.trainer.model))
    needed |= {main_input_name(failure.trainer.model)} & set(takes)
    if not is_own or not isinstance(given, Mapping) or (needed and needed <= set(given)):
        words = [name for name in words if name in takes and inputs is None]
    if not words:
        return None
    return f"column {words[0]!r} holds strings: tokenize them first, for example with dataset.map(...)"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], str))


def _not_one_number(failure: Failure) -> str | None:
    loss = failure.local("training_step", "loss")
    if not passed_through(failure.error, "backward") or not isinstance(loss, torch.Tensor) or loss.dim() == 0:
        return None
    return f"the loss has the shape {tuple(loss.shape)}; it must be one number: take the mean over samples or targets"


def _without_gradient(failure: Failure) -> str | None:
    loss = failure.local("training_step", "loss")
    if not passed_through(failure.error, "backward") or not isinstance(loss, torch.Tensor) or loss.requires_grad:
        return None
    return (
        "the loss does not depend on any trainable parameter: it was computed without gradients (no_grad, detach, "
        ".item()) or from frozen parts alone; compute it from the model's outputs as they are"
    )


def _no_loss(failure: Failure) -> str | None:
    names, trainer = failure.trainer.label_names, failure.trainer
    fails = passed_through(failure.error, "loss_of", "split_loss")
    if not failure.computes or passed_through(failure.error, "backward"):
        return None
    if not names or not isinstance(failure.inputs, Mapping) or set(names) & set(failure.inputs):
        return f"the model gives no loss: the batch has {failure.columns}" if fails else None
    if trainer.overrides("compute_loss", "training_step") and not fails:
        return None
    first = next((sample for sample in failure.samples if isinstance(sample, Mapping)), {})
    hidden = sorted(set(map(str, first)) - set(map(str, failure.inputs)))
    left_out = (
        f"; columns {hidden} of the data were left out, as the model's forward takes none of these names: rename the "
        f"one that holds labels to {names[0]!r}"
    )
    return f"the model gives no loss: no {' or '.join(names)} among {failure.columns}{left_out if hidden else ''}"


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


_TABLE: tuple[tuple[str, Callable[[Failure], str | None]], ...] = (
    ("T306", _out_of_memory),
    ("T504", _not_one_number),
    ("T505", _without_gradient),
    ("T514", _outside_of_embedding),
    ("T408", _fractions_as_labels),
    ("T502", _numbers_for_each_class),
    ("T405", _outside_of_classes),
    ("T410", _no_samples),
    ("T411", _text),
    ("T403", _unequal_samples),
    ("T502", _missing_columns),
    ("T502", _unfit_for_weights),
    ("T503", _no_loss),
    ("T409", _not_finite),
)
