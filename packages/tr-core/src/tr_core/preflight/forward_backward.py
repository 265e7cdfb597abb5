"""Send two samples forward and backward, and look at the loss and at the gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tr_core.data.order import MicroBatch
from tr_core.losses.loss_parts import split_loss
from tr_core.losses.targets import takes_argument
from tr_core.model_io import batch_size_of, to_device
from tr_core.preflight.as_in_training import as_in_training
from tr_core.preflight.label_range import labels_outside
from tr_core.preflight.raised import last_line, passed_through, place
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import SAMPLES, Subject
from tr_core.preflight.trainable import is_trainable

_NAMES_SHOWN = 3


class _Trial:
    """What the forward pass gave."""

    loss: Any = None
    outputs: Any = None


def check_forward_backward(subject: Subject) -> Iterator[Problem]:
    """Compute loss and gradients of two samples in training mode, as a step of the run would."""
    if subject.inputs is None or not is_trainable(subject.trainer.model):
        return
    trainer, figures = subject.trainer, subject.figures
    compiled = ", compiling the model first" if subject.args.torch_compile else ""
    subject.progress(f"one forward and backward of two samples{compiled}")
    trainer.model_wrapped.train()
    _reset_peak(trainer.strategy.device)
    start_s = time.perf_counter()
    trial = _Trial()
    with as_in_training(subject):
        problem = _go(subject, trial)
    if problem is not None:
        yield problem
        return
    figures["loss"] = trial.loss.item()  # sync: once a preflight, and the device is done then
    figures |= {"forward_backward_s": time.perf_counter() - start_s, "trial_samples": batch_size_of(subject.inputs)}
    _note_peak(subject)
    subject.gives_loss = True
    if subject.classes is None:
        subject.classes = _classes_of(trial.outputs, subject.inputs)
        yield from labels_outside(subject)
    yield from _of_gradients(subject)


def _go(subject: Subject, trial: _Trial) -> Problem | None:
    strategy = subject.trainer.strategy
    with strategy.accumulate(subject.trainer.model_wrapped, sync=True):
        try:
            with strategy.autocast():
                _forward(subject, trial)
        except Exception as error:
            return _of_forward(subject, error)
        if (problem := _of_loss(subject, trial.loss)) is not None:
            return problem
        try:
            strategy.backward(trial.loss)
        except Exception as error:
            return Problem("T502", f"the backward pass fails: {last_line(error)}", place(error))
    return None


def _forward(subject: Subject, trial: _Trial) -> None:
    trainer, rule = subject.trainer, subject.trainer.loss_rule
    model, inputs = trainer.model_wrapped, to_device(subject.inputs, trainer.strategy.device)
    extra: dict[str, Any] = {}
    if rule.counts and trainer._loss_takes_count:
        count = rule.count([MicroBatch(subject.inputs, 1.0, 0, None)])
        extra = {} if count is None else {"num_items_in_batch": count}
    if takes_argument(trainer.compute_loss, "return_outputs"):
        trial.loss, trial.outputs = trainer.compute_loss(model, inputs, return_outputs=True, **extra)
    else:
        trial.loss = trainer.compute_loss(model, inputs, **extra)
    if isinstance(trial.loss, Mapping):
        trial.loss, _ = split_loss(trial.loss)


def _of_forward(subject: Subject, error: Exception) -> Problem:
    trainer, where = subject.trainer, place(error)
    inputs = subject.inputs
    given = sorted(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
    if any(passed_through(error, name) for name in ("cross_entropy", "nll_loss")) and isinstance(error, IndexError):
        return Problem("T405", f"a label is outside the model's classes: {last_line(error)}", where)
    lacks = isinstance(inputs, Mapping) and trainer.label_names and not set(trainer.label_names) & set(inputs)
    if passed_through(error, "loss_of") or lacks:
        what = f"no {' or '.join(trainer.label_names)} among {given}" if lacks else f"the batch has {given}"
        return Problem("T503", f"the model gives no loss: {what}: {last_line(error)}", where)
    return Problem("T502", f"the forward pass of a batch with {given} fails: {last_line(error)}", where)


def _of_loss(subject: Subject, loss: Any) -> Problem | None:
    where = ""
    if not isinstance(loss, torch.Tensor):
        return Problem("T503", f"compute_loss gave {type(loss).__name__}; it must give a tensor", where)
    if loss.dim() != 0:
        return Problem(
            "T504",
            f"the loss has the shape {tuple(loss.shape)}; it must be one number: take the mean over samples or targets",
        )
    if not loss.requires_grad:
        return Problem(
            "T505",
            "the loss does not depend on any trainable parameter: it was computed without gradients (no_grad, detach, "
            ".item()) or from frozen parts alone; compute it from the model's outputs as they are",
        )
    if not torch.isfinite(loss).item():  # sync: once a preflight
        return Problem("T506", f"the loss of the first {SAMPLES} samples is {loss.item()}; {_culprit(subject)}")
    return None


def _culprit(subject: Subject) -> str:
    for name, parameter in subject.trainer.model.named_parameters():
        if not torch.isfinite(parameter).all().item():  # sync: once a preflight
            return f"the weights {name!r} hold numbers that are not finite: load them anew"
    inputs = subject.inputs if isinstance(subject.inputs, Mapping) else {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not torch.isfinite(value).all().item():
            return f"the input {name!r} holds numbers that are not finite: clean the data"
    return "weights and inputs are finite: look for a division by zero, a logarithm of 0, or a mean over no target"


def _of_gradients(subject: Subject) -> Iterator[Problem]:
    named = [(name, p) for name, p in subject.trainer.model.named_parameters() if p.requires_grad]
    without = [name for name, parameter in named if parameter.grad is None]
    if without:
        shown = ", ".join(without[:_NAMES_SHOWN]) + (", ..." if len(without) > _NAMES_SHOWN else "")
        yield Problem(
            "T508",
            f"{len(without)} of {len(named)} trainable parameters took no part in the loss of two samples ({shown}); "
            "freeze them, or use them; several processes need ddp_find_unused_parameters=True for them",
        )
    if subject.args.fp16:
        return  # scaled losses overflow at first, and the scale adapts
    bad = [name for name, p in named if p.grad is not None and not torch.isfinite(p.grad).all().item()]  # sync: once
    if bad:
        yield Problem(
            "T507",
            f"the loss is finite, but the gradient of {bad[0]!r} and {len(bad) - 1} other parameters is not; look for "
            "a square root or a norm of 0",
        )


def _classes_of(outputs: Any, inputs: Any) -> int | None:
    """Return the width of the logits, where labels are whole numbers, one for each of them."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return None
    is_whole = not labels.dtype.is_floating_point and labels.dtype != torch.bool
    return logits.shape[-1] if is_whole and logits.shape[:-1] == labels.shape and logits.shape[-1] > 1 else None


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def _note_peak(subject: Subject) -> None:
    device = subject.trainer.strategy.device
    if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "max_memory_allocated"):
        subject.figures["peak_bytes"] = module.max_memory_allocated(device)
