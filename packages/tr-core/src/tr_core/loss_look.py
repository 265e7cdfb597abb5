"""Look at the loss of the first micro-batch of a run, to see what it is divided by (`loss.py` decides)."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from tr_core.loss import ZERO_WITH_GRADIENTS, Pair, split_loss
from tr_core.model_io import local_shard, to_device
from tr_core.optim.fused_backward import kind
from tr_core.rollback import Rollback, without_own_hooks
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
        rollback, scope.size_was_read = _rollback(methods, model), False
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


def _rollback(methods: TrainerMethods, model: nn.Module) -> Rollback:
    return Rollback(methods.strategy.device, model, methods, vars(methods), vars(methods.state), methods.loss_function)


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
    # What was compiled runs as written: it would be compiled for one call.
    stance = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        # Checkpointing warns where there are no gradients.
        with warnings.catch_warnings(action="ignore"), torch.no_grad(), without_own_hooks(model), stance:
            return _pair(methods, model, inputs, num_items, context, doubles_size)
    except Exception as error:
        # It may need gradients, a hook, or the memory that compiled code saves.
        logger.debug("the loss is looked at in a step like any other: %r", error)
    return _pair(methods, model, inputs, num_items, context, doubles_size)


def _pair(
    methods: TrainerMethods,
    model: nn.Module,
    inputs: Any,
    num_items: torch.Tensor | None,
    context: Callable[[], Any],
    doubles_size: bool,
) -> Pair:
    own, scope, unit = vars(methods), methods.scope, 0.0
    size, rollback = scope.size, _rollback(methods, model)
    doubled = float(size if num_items is None or doubles_size else num_items)
    losses: list[float] = []
    options: dict[str, Any] = (
        {"return_outputs": True} if methods.is_in_evaluation or methods.callback_handler.wants_outputs else {}
    )
    for factor in (1, 2):
        if methods._loss_takes_count:
            options["num_items_in_batch"] = num_items if num_items is None or doubles_size else num_items * factor
        own.update(log=_nothing, log_metric=_nothing)  # undone with the rest
        scope.size = size * factor if doubles_size else size
        try:
            with context():
                copied = to_device(inputs, methods.strategy.device, copy=True)
                loss = methods.compute_loss(model, copied, **options)
        finally:
            rollback.restore()
            scope.size = size
            torch.clear_autocast_cache()  # it has weights without gradients
        loss = loss[0] if "return_outputs" in options else loss
        loss = split_loss(loss)[0] if isinstance(loss, Mapping) else loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return Pair(doubled, math.nan, math.nan, unit)
        losses.append(float(loss.detach()))  # sync
        unit = torch.finfo(loss.dtype).eps / 2 if loss.is_floating_point() else 0.0
    return Pair(doubled, losses[0], losses[1], unit)


def refuse_gradients_of_zero(methods: TrainerMethods) -> None:
    """Refuse a loss of 0 that has gradients while it is not known what it is divided by. Sync. Collective."""
    strategy, methods.loss_rule.was_zero = methods.strategy, False
    gradients = [p.grad for p in methods.model.parameters() if p.grad is not None]
    # Where gradients are gone already, none is seen.
    hides = strategy.binds_optimizer or (methods.optimizer and kind(methods.optimizer) == "backward-update")
    has_any = hides or any(bool(local_shard(gradient).any()) for gradient in gradients)
    if any(strategy.gather_objects(has_any)):
        raise ValueError(ZERO_WITH_GRADIENTS)


def _nothing(*args: Any, **named: Any) -> None:
    """Log nothing."""
