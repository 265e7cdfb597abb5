"""Check the model with two samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tr_core.data.sampler import MicroBatch
from tr_core.loss import split_loss
from tr_core.model_io import batch_size_of, to_device
from tr_core.preflight.context import SAMPLES, CheckContext, training_mode
from tr_core.preflight.data_checks import count_rows, labels_outside
from tr_core.preflight.origins import last_line, passed_through, raised_at
from tr_core.preflight.report import Problem
from tr_core.random_state import set_seed
from tr_core.signatures import takes_argument
from tr_core.trainer_methods import TrainerMethods
from tr_core.validation import check_quantized


def check_trainable(subject: CheckContext) -> Iterator[Problem]:
    """Find a model whose parameters are all frozen, or quantized without an adapter."""
    model = subject.trainer.model
    if subject.trains:
        try:
            check_quantized(model)
        except ValueError as error:
            yield Problem("T513", str(error))
            return
    if subject.trains and not is_trainable(model):
        total = sum(1 for _ in model.parameters())
        yield Problem(
            "T501",
            f"none of the {total} parameters of {type(model).__name__} is trainable; set requires_grad where training "
            "is to change something",
        )


def is_trainable(model: nn.Module) -> bool:
    """Whether a model has a parameter that training changes."""
    return any(parameter.requires_grad for parameter in model.parameters())


_NAMES_SHOWN = 3


class _Trial:
    """The results of the forward pass."""

    loss: Any = None
    outputs: Any = None


def check_forward_backward(subject: CheckContext) -> Iterator[Problem]:
    """Compute loss and gradients of two samples in training mode, as in a step of the run."""
    if subject.inputs is None or not is_trainable(subject.trainer.model):
        return
    trainer, figures = subject.trainer, subject.figures
    compiled = ", compiling the model first" if subject.args.torch_compile else ""
    subject.progress(f"one forward and backward of two samples{compiled}")
    trainer.model_wrapped.train()
    _reset_peak(trainer.strategy.device)
    start_s = time.perf_counter()
    trial = _Trial()
    with training_mode(subject):
        problem = _forward_and_backward(subject, trial)
    if problem is not None:
        yield problem
        return
    figures["loss"] = trial.loss.item()  # sync: once a preflight, when the device has finished
    figures |= {"forward_backward_s": time.perf_counter() - start_s, "trial_samples": batch_size_of(subject.inputs)}
    _record_peak(subject)
    subject.gives_loss = True
    if subject.classes is None:
        subject.classes = _classes_of(trial.outputs, subject.inputs)
        yield from labels_outside(subject)
    yield from _of_gradients(subject)


def _forward_and_backward(subject: CheckContext, trial: _Trial) -> Problem | None:
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
            return Problem("T502", f"the backward pass fails: {last_line(error)}", raised_at(error))
    return None


def _forward(subject: CheckContext, trial: _Trial) -> None:
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


def _of_forward(subject: CheckContext, error: Exception) -> Problem:
    trainer, where = subject.trainer, raised_at(error)
    inputs = subject.inputs
    given = sorted(map(str, inputs)) if isinstance(inputs, Mapping) else type(inputs).__name__
    if any(passed_through(error, name) for name in ("cross_entropy", "nll_loss")) and isinstance(error, IndexError):
        return Problem("T405", f"a label is outside the model's classes: {last_line(error)}", where)
    lacks = isinstance(inputs, Mapping) and trainer.label_names and not set(trainer.label_names) & set(inputs)
    if passed_through(error, "loss_of") or lacks:
        what = f"no {' or '.join(trainer.label_names)} among {given}" if lacks else f"the batch has {given}"
        return Problem("T503", f"the model gives no loss: {what}: {last_line(error)}", where)
    return Problem("T502", f"the forward pass of a batch with {given} fails: {last_line(error)}", where)


def _of_loss(subject: CheckContext, loss: Any) -> Problem | None:
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


def _culprit(subject: CheckContext) -> str:
    for name, parameter in subject.trainer.model.named_parameters():
        if not torch.isfinite(parameter).all().item():  # sync: once a preflight
            return f"the weights {name!r} hold numbers that are not finite: load them again"
    inputs = subject.inputs if isinstance(subject.inputs, Mapping) else {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not torch.isfinite(value).all().item():
            return f"the input {name!r} holds numbers that are not finite: clean the data"
    return "weights and inputs are finite: look for a division by zero, a logarithm of 0, or a mean over no target"


def _of_gradients(subject: CheckContext) -> Iterator[Problem]:
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
    """Return the width of the logits, if labels are whole numbers, one for each row."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return None
    is_whole = not labels.dtype.is_floating_point and labels.dtype != torch.bool
    return logits.shape[-1] if is_whole and logits.shape[:-1] == labels.shape and logits.shape[-1] > 1 else None


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "reset_peak_memory_stats"):
        module.reset_peak_memory_stats(device)


def _record_peak(subject: CheckContext) -> None:
    device = subject.trainer.strategy.device
    if device.type != "cpu" and hasattr(module := torch.get_device_module(device), "max_memory_allocated"):
        subject.figures["peak_bytes"] = module.max_memory_allocated(device)


@dataclass
class _Step:
    """Loss and gradients of one step without its update."""

    loss: float
    gradients: list[torch.Tensor]
    duration_s: float = 0.0


def check_loss_division(subject: CheckContext) -> Iterator[Problem]:
    """Compare 1 micro-batch of N samples with N micro-batches of 1: equal but for rounding.

    The model is in evaluation mode, so that neither dropout nor batch statistics make a difference. The samples are
    rows of one batch, so that the collator makes no difference either. A loss that depends on random numbers cannot be
    compared.
    """
    if not subject.gives_loss or subject.inputs is None:
        return
    number = batch_size_of(subject.inputs) or 0
    if number < 2:
        return
    subject.progress("testing what the loss is divided by")
    trainer = subject.trainer
    trainer.model_wrapped.eval()
    tolerance = tolerance_of(subject)
    singles = [count_rows(subject.inputs, index, index + 1) for index in range(number)]
    try:
        with training_mode(subject, with_conditions=False):
            whole, again = (_step(trainer, [subject.inputs], seed) for seed in (1, 2))
            divided = _step(trainer, singles, seed=1)
    except Exception as error:
        yield Problem("T512", f"samples of the batch cannot be taken one by one: {last_line(error)}")
        return
    # The first forward and backward allocate and warm up.
    subject.figures["forward_backward_s"] = min(subject.figures["forward_backward_s"], again.duration_s)
    if _difference(whole, again) > tolerance:
        yield Problem("T512", "the loss depends on random numbers: dividing it into micro-batches was not compared")
    elif _difference(whole, divided) > tolerance:
        yield _explain(subject, whole, divided, number, tolerance)


def tolerance_of(subject: CheckContext) -> float:
    """Return the relative difference that rounding can cause in the precision of the computation."""
    lowest = torch.bfloat16 if subject.args.bf16 else torch.float16 if subject.args.fp16 else torch.float64
    weights = [p.dtype for p in subject.trainer.model.parameters() if p.is_floating_point()]
    # Float32 values are summed over thousands of terms; sixteen half-precision roundings are a coarse bound.
    return max(max(_share(dtype) for dtype in (*weights, lowest)), 1e-9)


def _share(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps * (16 if dtype in (torch.bfloat16, torch.float16) else 2000)


def _step(trainer: TrainerMethods, pieces: Sequence[Any], seed: int) -> _Step:
    """Run the forward and backward passes of one step; `pieces` are its micro-batches."""
    model, strategy, rule = trainer.model_wrapped, trainer.strategy, trainer.loss_rule
    set_seed(seed)
    model.zero_grad(set_to_none=True)
    start_s = time.perf_counter()
    trainer.scope.size, trainer.scope.weight = len(pieces), 1.0
    num_items = rule.count([MicroBatch(piece, 1.0, 0, None) for piece in pieces]) if rule.counts else None
    total = torch.zeros((), device=strategy.device)
    for number, piece in enumerate(pieces, start=1):
        with strategy.accumulate(model, sync=number == len(pieces)):
            total = total + trainer.step_function(model, piece, num_items)
    loss = total.item()  # sync: a preflight reads what it compares, when the device has finished
    duration_s = time.perf_counter() - start_s
    gradients = [p.grad.detach().clone() for p in trainer.model.parameters() if p.grad is not None]
    return _Step(loss, gradients, duration_s)


def _difference(first: _Step, second: _Step) -> float:
    """Return the larger of the relative differences of losses and of gradients."""
    scale = max(abs(first.loss), abs(second.loss), 1e-12)
    loss = abs(first.loss - second.loss) / scale
    if len(first.gradients) != len(second.gradients):
        return float("inf")
    norm = max(_norm(first.gradients), _norm(second.gradients))
    apart = _norm([a - b for a, b in zip(first.gradients, second.gradients, strict=True)])
    return max(loss, apart / norm if norm else 0.0)


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors)) if tensors else 0.0  # sync: as above


def _explain(subject: CheckContext, whole: _Step, divided: _Step, number: int, tolerance: float) -> Problem:
    losses = f"{whole.loss:.6g} for 1 micro-batch of {number} samples, {divided.loss:.6g} for {number} of 1"
    ratio = whole.loss / divided.loss if divided.loss else float("inf")
    scaled = _Step(divided.loss * number, [gradient * number for gradient in divided.gradients])
    if _difference(whole, scaled) <= tolerance:
        return Problem(
            "T509",
            f"the loss is a sum over the samples, not a mean: {losses}, a ratio of {ratio:.4g}; divide it by the "
            "number of samples or targets, or take num_items_in_batch and divide by that",
        )
    args = subject.args
    accumulates = args.gradient_accumulation_steps > 1 or subject.trainer.strategy.world_size > 1
    cause = "a mean over targets of which samples have unequal numbers, or a loss that compares the samples of a batch"
    if accumulates:
        return Problem(
            "T510",
            f"the loss of a step depends on how it is divided: {losses} (relative difference "
            f"{_difference(whole, divided):.2g}); the cause is {cause}. Take num_items_in_batch in the loss and divide "
            "a sum by it, or set gradient_accumulation_steps=1",
            subject.origin("gradient_accumulation_steps"),
        )
    return Problem("T511", f"the loss depends on the micro-batch: {losses}; the cause is {cause}")
