"""Look at the loss of a run's first micro-batch: what it is divided by, and what its targets are (for `loss.py`)."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from tr_core.label_smoothing import LabelSmoother
from tr_core.loss import ZERO_WITH_GRADIENTS, Pair, split_loss
from tr_core.model_io import IGNORED_TARGET, ignores_targets, local_shard, loss_of, to_device
from tr_core.optim.fused_backward import kind
from tr_core.rollback import Rollback, without_own_hooks
from tr_core.runtime.memory import free_memory, is_out_of_memory
from tr_core.trainer_methods import TrainerMethods
from tr_log import get_logger

logger = get_logger("tr_core.trainer")


def observe_training(methods: TrainerMethods, model: nn.Module, inputs: Any, num_items: torch.Tensor) -> None:
    """Find out whether the losses of training are divided by the count that they get. Collective. Sync."""
    targets = methods.loss_rule.count_inputs(inputs)
    methods.loss_rule.observe(
        lambda: losses_with(methods, model, inputs, num_items, methods.loss_context),
        has_targets=targets is None or bool(targets),  # sync: until it is known, mostly once a run
        is_scaled=methods.loss_is_scaled_for_ga,
    )


def first_loss(methods: TrainerMethods, model: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
    """Call `compute_loss` where it is not known whether it divides by the accumulation itself. Collective.

    It can only if it reads `current_gradient_accumulation_steps`. Then all is put back as it was, the loss is looked
    at, and is computed again for the step.
    """
    rule, scope = methods.loss_rule, methods.scope
    if methods.overrides("compute_loss"):
        rollback, scope.size_was_read = rollback_of(methods, model), False
        with methods.loss_context():
            loss = methods.compute_loss(model, to_device(inputs, methods.strategy.device, copy=True), **options)
        if not any(methods.strategy.gather_objects(scope.size_was_read)):
            rule.divides_itself = False
            return loss
        del loss  # and what its backward pass would need
        rollback.restore()
        number = options.get("num_items_in_batch")
        look = functools.partial(losses_with, methods, model, inputs, number, methods.loss_context, doubles_size=True)
        rule.observe_accumulation(look, is_counted=number is not None)
    else:
        rule.divides_itself = False
    with methods.loss_context():
        return methods.compute_loss(model, inputs, **options)


def rollback_of(methods: TrainerMethods, model: nn.Module) -> Rollback:
    """Return what puts everything back that a forward, a loss or a random number may change."""
    return Rollback(methods.strategy.device, model, methods, vars(methods), vars(methods.state), methods.loss_function)


class _Variant(NamedTuple):
    """What one of several losses of the same micro-batch gets.

    Attributes:
        num_items: the count of its step.
        size: the micro-batches of its step.
        labels: in place of its labels; None for these.
    """

    num_items: torch.Tensor | None
    size: int
    labels: torch.Tensor | None = None


def losses_with(
    methods: TrainerMethods,
    model: nn.Module,
    inputs: Any,
    num_items: torch.Tensor | None,
    context: Callable[[], Any],
    *,
    doubles_size: bool = False,
) -> Pair:
    """Compute a loss with the count, or number of micro-batches, and with twice that; leave all as it was. Sync."""
    size = methods.scope.size
    once = _Variant(num_items, size)
    doubled = float(size if num_items is None or doubles_size else num_items)
    twice = _Variant(num_items, 2 * size) if doubles_size or num_items is None else _Variant(2 * num_items, size)
    (first, second), unit = _losses(methods, model, inputs, (once, twice), context)
    return Pair(doubled, first, second, unit)


def first_is_target(methods: TrainerMethods, model: nn.Module, inputs: Any, context: Callable[[], Any]) -> bool | None:
    """Whether the loss takes the first label of a row for a target; None where memory does not suffice. Sync.

    Where a model predicts the next position, the loss of first labels alone is that of no labels: an auxiliary loss,
    0, or NaN for a mean. Any micro-batch shows it, whatever its labels are: all ranks make the same forwards.
    """
    labels = inputs["labels"]
    none = torch.full_like(labels, IGNORED_TARGET)
    first = none.clone()
    first[:, 0] = 0  # a class that every model has
    rows = torch.full((), len(labels), device=methods.strategy.device)
    variants = [_Variant(rows, 1, given) for given in (first, none)]
    # Smoothed labels are shifted as the model shifts them: its own loss shows it.
    compute = functools.partial(_own_loss, methods) if isinstance(methods.loss_function, LabelSmoother) else None
    try:
        (alone, empty), _ = _losses(methods, model, inputs, variants, context, compute)
    except Exception as error:
        if is_out_of_memory(error):  # so will the step, which needs more, and the next smaller batch is looked at
            free_memory(error, methods.strategy.device)
            return None
        logger.warning(
            "whether the first label of a row is a target cannot be seen, so it counts as one: the loss with all other "
            "labels -100 failed with %r; override _get_num_items_in_batch if it is none",
            error,
        )
        return True
    return not (alone == empty or (math.isnan(alone) and math.isnan(empty)) or math.isclose(alone, empty, rel_tol=1e-4))


def is_mean_over_targets(
    methods: TrainerMethods, model: nn.Module, inputs: Any, num_items: torch.Tensor
) -> bool | None:
    """Whether the loss of an evaluation batch is a mean over its targets; None if it has too few. Sync.

    The mean over all is then that of the means over a third and over the others, weighted by their numbers.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) and ignores_targets(methods.model) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return False
    is_target = labels != IGNORED_TARGET
    if methods.loss_rule.shifts and labels.dim() == 2:
        is_target[:, 0] = False
    places = is_target.flatten().nonzero().flatten()
    total, number = len(places), len(places) // 3
    if not number:
        return None
    one = torch.full_like(labels, IGNORED_TARGET)
    one.view(-1)[places[:number]] = labels.reshape(-1)[places[:number]]
    others = labels.masked_fill(one != IGNORED_TARGET, IGNORED_TARGET)
    variants = [_Variant(num_items, 1, given) for given in (None, one, others)]
    (whole, part, rest), unit = _losses(methods, model, inputs, variants, nullcontext)
    return math.isclose(whole, (number * part + (total - number) * rest) / total, rel_tol=max(1e-5, 4 * unit))


def _losses(
    methods: TrainerMethods,
    model: nn.Module,
    inputs: Any,
    variants: Sequence[_Variant],
    context: Callable[[], Any],
    compute: Callable[..., Any] | None = None,
) -> tuple[list[float], float]:
    """Return the losses of a micro-batch from the same state, and the relative error of one rounding. Sync.

    A loss that is not a single number is NaN: its backward pass refuses it. `compute` computes one in place of
    `compute_loss`.
    """

    def in_turn() -> tuple[list[float], float]:
        rollback = rollback_of(methods, model)
        used = compute or methods.compute_loss
        found = [
            _loss(methods, functools.partial(used, model), inputs, variant, context, rollback) for variant in variants
        ]
        return [loss for loss, _ in found], found[0][1]

    # What was compiled runs as written: it would be compiled for one call.
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        # Checkpointing warns where there are no gradients.
        with warnings.catch_warnings(action="ignore"), torch.no_grad(), without_own_hooks(model), stance:
            return in_turn()
    except Exception as error:
        # It may need gradients, a hook, or the memory that compiled code saves.
        logger.debug("the loss is looked at in a step like any other: %r", error)
    return in_turn()


def _loss(
    methods: TrainerMethods,
    compute: Callable[..., Any],
    inputs: Any,
    variant: _Variant,
    context: Callable[[], Any],
    rollback: Rollback,
) -> tuple[float, float]:
    own, scope, size = vars(methods), methods.scope, methods.scope.size
    wants_outputs = methods.is_in_evaluation or methods.callback_handler.wants_outputs
    options: dict[str, Any] = {"return_outputs": True} if wants_outputs else {}
    if methods._loss_takes_count:
        options["num_items_in_batch"] = variant.num_items
    own.update(log=_nothing, log_metric=_nothing)  # undone with the rest
    scope.size = variant.size
    try:
        with context():
            copied = to_device(inputs, methods.strategy.device, copy=True)
            if variant.labels is not None:
                copied["labels"] = variant.labels.to(methods.strategy.device)
            loss = compute(copied, **options)
    finally:
        rollback.restore()
        scope.size = size
        torch.clear_autocast_cache()  # it has weights without gradients
    loss = loss[0] if wants_outputs else loss
    loss = split_loss(loss)[0] if isinstance(loss, Mapping) else loss
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        return math.nan, 0.0
    return float(loss.detach()), torch.finfo(loss.dtype).eps / 2 if loss.is_floating_point() else 0.0  # sync


def _own_loss(methods: TrainerMethods, model: nn.Module, inputs: Any, **options: Any) -> Any:
    """Compute the model's own loss as `compute_loss` does without a loss function."""
    count = {"num_items_in_batch": options["num_items_in_batch"]} if methods.loss_rule.accepts_count else {}
    outputs = model(**{**inputs, **count})
    loss = loss_of(outputs, inputs)
    return (loss, outputs) if "return_outputs" in options else loss


def refuse_gradients_of_zero(methods: TrainerMethods) -> None:
    """Refuse a loss of 0 that has gradients while it is not known what it is divided by. Sync. Collective."""
    strategy, methods.loss_rule.was_zero = methods.strategy, False
    if strategy.schedules_micro_batches:  # its backward is still to come, and others are elsewhere
        return
    gradients = [p.grad for p in methods.model.parameters() if p.grad is not None]
    # Where gradients are gone already, none is seen.
    hides = strategy.binds_optimizer or (methods.optimizer and kind(methods.optimizer) == "backward-update")
    has_any = hides or any(bool(local_shard(gradient).any()) for gradient in gradients)
    if any(strategy.gather_objects(has_any)):
        raise ValueError(ZERO_WITH_GRADIENTS)


def _nothing(*args: Any, **named: Any) -> None:
    """Log nothing."""
