"""Say what is wrong with a micro-batch that cannot be made, or whose forward, loss or backward failed, and what to do.

`trainer check` and a run ask the same table. A good step costs nothing: the loop declares which micro-batch it computes
(`StepScope.inputs`), and the rest is what the exception holds: the arguments of the function of torch
that it came through.
"""

from __future__ import annotations

import multiprocessing.reduction
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from time import monotonic
from typing import Any

import torch
from torch.nn import functional

from tr_core.data.loaders import is_map_style
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

    def misfit(self, limits: Limits) -> str | None:
        """Return what is wrong with the first sample of the data, or with the micro-batch, that has such a number."""
        kind = "training" if self.data is self.trainer.train_dataset else "evaluation"
        samples = ((f"sample {index} of the {kind} data", sample) for index, sample in scan(self.data, 100_000))
        found = misfits(chain(samples, [("the micro-batch", self.inputs)]), limits)
        return next((text for code, text in found if not limits or code != "T409"), None)

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
        if found := diagnose(failure):
            error.add_note(found[1])
    trainer.scope.inputs = None  # what surrounds an evaluation does not explain its error again


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
    if failure.data is not failure.trainer.train_dataset:
        return (
            f"memory ran out in an evaluation with per_device_eval_batch_size={args.per_device_eval_batch_size}: lower "
            "it, and set eval_accumulation_steps=1, so that predictions leave the device"
        )
    size, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    now = f"memory ran out with per_device_train_batch_size={size} and gradient_accumulation_steps={steps}"
    less = size // 2 if size % 2 == 0 else 1
    smaller = f"set them to {less} and {steps * size // less}, which keeps the samples of a step"
    smaller = f"{smaller}, or auto_find_batch_size=True" if size > 1 else "a micro-batch is one sample"
    on = " is on already" if args.gradient_checkpointing else "=True"
    return f"{now}: {smaller}; gradient_checkpointing{on}; shorter samples need less too"


def _outside_of_embedding(failure: Failure) -> str | None:
    ids, weight = failure.local(functional.embedding, "input"), failure.local(functional.embedding, "weight")
    if weight is None or not isinstance(failure.error, IndexError):
        return None
    rows = len(weight)
    same = [name for name, column in failure.tensors.items() if torch.equal(column.cpu(), ids.cpu())]
    value = next(iter(ids[(ids < 0) | (ids >= rows)].tolist()), None)  # sync: the run has ended
    return failure.misfit(dict.fromkeys(same, ("T514", rows, 0))) or (
        f"an embedding of {rows} rows has no row {value}, and no column of the batch holds that number: if it is one "
        f"of positions, samples are too long for the model; truncate them to {rows}"
    )


def _behind_lost_device(failure: Failure) -> str | None:
    limits = limits_of(failure.trainer.model, failure.trainer.label_names, failure.inputs)
    return failure.misfit(limits) if failure.lost_device else None


Limits = dict[str, tuple[str, int, int]]
"""Of columns of labels and ids: the code of a number outside, how many there are from 0 on, and one of no matter."""


def limits_of(model: Any, names: list[str], inputs: Any) -> Limits:
    """Return the limits that the configuration of a model of transformers tells, for samples of such a batch."""
    model = base_model(model)
    embedding = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    rows = getattr(embedding, "num_embeddings", None)
    limits: Limits = {main_input_name(model): ("T514", rows, 0)} if rows else {}
    given = inputs if isinstance(inputs, Mapping) else {}
    labels = next((given[name] for name in ("labels", *names) if name in given), None)
    config = getattr(model, "config", None)
    per_sample = getattr(labels, "ndim", 0) == 1 or "TokenClassification" in type(model).__name__
    classes: Any = getattr(config, "num_labels" if per_sample else "vocab_size", None)
    is_known = isinstance(classes, int) and classes > 1 and getattr(config, "problem_type", None) != "regression"
    return limits | (limits_of_labels(names, classes) if is_known else {})


def limits_of_labels(names: list[str], classes: int, ignored: int = IGNORED_TARGET) -> Limits:
    """Return the limits of labels that are class numbers."""
    return dict.fromkeys(("labels", "label", "label_ids", *names), ("T405", classes, ignored))


_MISFIT = {
    "T405": "{where} has the label {value}, but the model has {limit} classes: labels are whole numbers from 0 on, or "
    f"{IGNORED_TARGET} for none; give the model more classes (num_labels), or number the labels from 0",
    "T409": "column {name!r} of {where} holds {value}: fill in or leave out what is missing in the data",
    "T514": "column {name!r} of {where} holds the id {value}, but the model's embedding has {limit} rows: use the "
    "tokenizer of this model, or make room with model.resize_token_embeddings(len(tokenizer))",
}


def misfits(samples: Iterable[tuple[str, Any]], limits: Limits) -> Iterator[tuple[str, str]]:
    """Yield code and words for each column of samples, given with their places, that holds a number out of place."""
    for where, sample in samples:
        for name, value in sample.items() if isinstance(sample, Mapping) else ():
            with suppress(TypeError, ValueError, RuntimeError):  # no numbers, or rows of unequal length
                numbers = torch.as_tensor(value)
                code, limit, ignored = limits.get(name, ("", 0, 0))
                if numbers.is_floating_point():
                    code, is_bad = "T409", ~numbers.isfinite()
                else:
                    is_bad = ((numbers < 0) | (numbers >= limit)) & (numbers != ignored)
                if code and is_bad.any():
                    value = numbers[is_bad].flatten()[0].item()  # sync: a sample is on the host
                    yield code, _MISFIT[code].format(where=where, name=name, value=value, limit=limit)


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
    return (
        f"the labels are {_dtype(labels)} of the shape {tuple(labels.shape)}, and a cross entropy takes class numbers: "
        "make them one whole number (int64) for each sample, from 0 on; for probabilities of the classes give float32, "
        "and for a regression give the model one output (num_labels=1)"
    )


def _outside_of_classes(failure: Failure) -> str | None:
    labels, scores = _labels(failure)
    if labels is None or not isinstance(failure.error, IndexError):
        return None
    classes, ignored = scores.shape[min(1, scores.dim() - 1)], failure.local(functional.cross_entropy, "ignore_index")
    given = (classes,) if ignored is None else (classes, ignored)
    return failure.misfit(limits_of_labels(failure.trainer.label_names, *given))


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


def _contents(failure: Failure) -> str | None:
    shown = [f"{name} {_dtype(value)} {tuple(value.shape)}" for name, value in failure.tensors.items()]
    return f"the micro-batch holds {', '.join(shown)}" if shown else None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _no_gradient(failure: Failure) -> str | None:
    loss = failure.loss
    if loss is None or (loss.dim() == 0 and loss.requires_grad):
        return None
    if loss.dim() > 0:
        shape = tuple(loss.shape)
        return f"the loss has the shape {shape}; it must be one number: take the mean over samples or targets"
    return (
        "the loss does not depend on any trainable parameter: it was computed without gradients (no_grad, detach, "
        ".item()) or from frozen parts alone; compute it from the model's outputs as they are"
    )


def _no_loss(failure: Failure) -> str | None:
    names, inputs = failure.trainer.label_names, failure.inputs
    is_refused = failure.local(loss_of, "outputs") is not None
    is_by_override = failure.trainer.overrides("compute_loss", "training_step")
    if failure.loss is not None or (is_by_override and not is_refused):
        return None
    if names and isinstance(inputs, Mapping) and not set(names) & set(inputs):
        return f"the model gives no loss: no {' or '.join(names)} among {failure.columns}{failure.left_out}"
    return f"the model gives no loss: the batch has {failure.columns}" if is_refused else None


def _not_finite(failure: Failure) -> str | None:
    return failure.misfit({}) if isinstance(failure.error, FloatingPointError) else None


_Rows = tuple[tuple[str, Callable[[Failure], str | None]], ...]
_OF_A_BATCH: _Rows = (
    ("T306", _out_of_memory),
    ("T505", _no_gradient),
    ("T514", _outside_of_embedding),
    ("T405", _behind_lost_device),
    ("T408", _no_class_numbers),
    ("T405", _outside_of_classes),
    ("T502", _missing_columns),
    ("T503", _no_loss),
    ("T502", _contents),
)
_OF_OTHERS: _Rows = (("T404", _not_sent), ("T409", _not_finite))
