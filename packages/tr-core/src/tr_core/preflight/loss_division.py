"""Test what the loss is divided by: samples in one micro-batch and one by one must give the same loss and gradients."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tr_core.data.order import MicroBatch
from tr_core.model_io import batch_size_of
from tr_core.preflight.as_in_training import as_in_training
from tr_core.preflight.first_batch import rows
from tr_core.preflight.raised import last_line
from tr_core.preflight.report import Problem
from tr_core.preflight.subject import Subject
from tr_core.randomness import set_seed

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


@dataclass
class _Step:
    """Loss and gradients of one step without its update."""

    loss: float
    gradients: list[torch.Tensor]
    duration_s: float = 0.0


def check_loss_division(subject: Subject) -> Iterator[Problem]:
    """Compare 1 micro-batch of N samples with N micro-batches of 1: equal but for rounding.

    The model is in evaluation mode, so that neither dropout nor the statistics of a batch make a difference; the
    samples are rows of one batch, so that a collator makes none either. A loss that depends on random numbers cannot
    be compared.
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
    singles = [rows(subject.inputs, index, index + 1) for index in range(number)]
    try:
        with as_in_training(subject, with_conditions=False):
            whole, again = (_step(trainer, [subject.inputs], seed) for seed in (1, 2))
            divided = _step(trainer, singles, seed=1)
    except Exception as error:
        yield Problem("T512", f"samples of the batch cannot be taken one by one: {last_line(error)}")
        return
    # The very first pass allocates and warms up.
    subject.figures["forward_backward_s"] = min(subject.figures["forward_backward_s"], again.duration_s)
    if _difference(whole, again) > tolerance:
        yield Problem("T512", "the loss depends on random numbers: dividing it into micro-batches was not compared")
    elif _difference(whole, divided) > tolerance:
        yield _explain(subject, whole, divided, number, tolerance)


def tolerance_of(subject: Subject) -> float:
    """Return the relative difference that rounding can make, from the precision that is computed in."""
    lowest = torch.bfloat16 if subject.args.bf16 else torch.float16 if subject.args.fp16 else torch.float64
    weights = [p.dtype for p in subject.trainer.model.parameters() if p.is_floating_point()]
    # Weights of float32 are summed over thousands of terms; sixteen half-precision roundings are a coarse bound.
    return max(max(_share(dtype) for dtype in (*weights, lowest)), 1e-9)


def _share(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps * (16 if dtype in (torch.bfloat16, torch.float16) else 2000)


def _step(trainer: Trainer, pieces: Sequence[Any], seed: int) -> _Step:
    """Make the forward and backward passes of one step; `pieces` are its micro-batches."""
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
    loss = total.item()  # sync: a preflight reads what it compares, and the device is done then
    duration_s = time.perf_counter() - start_s
    gradients = [p.grad.detach().clone() for p in trainer.model.parameters() if p.grad is not None]
    return _Step(loss, gradients, duration_s)


def _difference(first: _Step, second: _Step) -> float:
    """Return the larger one of the relative differences of losses and of gradients."""
    scale = max(abs(first.loss), abs(second.loss), 1e-12)
    loss = abs(first.loss - second.loss) / scale
    if len(first.gradients) != len(second.gradients):
        return float("inf")
    norm = max(_norm(first.gradients), _norm(second.gradients))
    apart = _norm([a - b for a, b in zip(first.gradients, second.gradients, strict=True)])
    return max(loss, apart / norm if norm else 0.0)


def _norm(tensors: list[torch.Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(tensors)) if tensors else 0.0  # sync: as above


def _explain(subject: Subject, whole: _Step, divided: _Step, number: int, tolerance: float) -> Problem:
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
