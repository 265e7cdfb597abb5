"""Compute the loss and gradients of one micro-batch, in methods that a subclass may override."""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from tr_core.evaluation.gather import map_tensors
from tr_core.loss import ZERO_WITH_GRADIENTS, Division, Pair, split_loss
from tr_core.model_io import batch_size_of, local_shard, loss_of, to_device
from tr_core.optim.fused_backward import kind
from tr_core.rollback import Rollback, without_own_hooks
from tr_core.state import EventContext
from tr_core.trainer.output_methods import Reporting


class Stepping(Reporting):
    """Train and evaluate on one micro-batch.

    Attributes:
        loss_is_scaled_for_ga: what `compute_loss` of a subclass returns. True: a loss already divided for the full
            step, which is used unchanged. False: a mean over its micro-batch, which is divided by their number. None:
            the Trainer observes whether the loss depends on `num_items_in_batch`. It may be set at any time.
    """

    loss_is_scaled_for_ga: bool | None = None
    _given_loss_kwargs: bool | None = None

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute loss and gradients of one micro-batch.

        Args:
            model: the wrapped model, in training mode.
            inputs: the batch, with tensors on the host.
            num_items_in_batch: targets of the full step over all ranks, a scalar tensor; None if not counted.

        Returns:
            This micro-batch's share of the step's loss, detached, on the device: nothing is read back.
        """
        if self.splits_sequences:
            return self._split_step(model, inputs, num_items_in_batch)
        inputs = self._prepare_inputs(inputs) if self.prepares_inputs else to_device(inputs, self.strategy.device)
        count: dict[str, Any] = {"num_items_in_batch": None} if self._loss_takes_count else {}
        if count and num_items_in_batch is not None:
            count = {"num_items_in_batch": num_items_in_batch}
            if self.loss_rule.is_open and self.observes_loss(num_items_in_batch):
                self._observe_training(model, inputs, num_items_in_batch)
        wants_outputs = self.callback_handler.wants_outputs
        options = {**count, "return_outputs": True} if wants_outputs else count
        self.loss_rule.is_own_loss = False
        if self.scope.size > 1 and self.loss_rule.divides_itself is None:
            loss = self._first_loss(model, inputs, options)
        else:
            with self.loss_context():
                loss = self.compute_loss(model, inputs, **options)
        loss, outputs = loss if wants_outputs else (loss, None)
        parts: dict[str, torch.Tensor] = {}
        if not isinstance(loss, torch.Tensor):
            loss, parts = split_loss(loss)
        size, weight, is_scaled = self.scope.size, self.scope.weight, self.loss_is_scaled_for_ga
        if num_items_in_batch is not None or size > 1 or weight != 1.0 or parts:
            given_count = None if num_items_in_batch is None else self._loss_takes_count
            division = self.loss_rule.division(given_count, size, is_scaled)
            loss = self.loss_rule.share(loss, division, size, weight)
            self._log_parts(parts, division)
        self.strategy.backward(loss)
        if self.loss_rule.was_zero:
            self._refuse_gradients_of_zero()
        if wants_outputs:
            self.scope.outputs = map_tensors(torch.Tensor.detach, outputs)
        return loss.detach()

    def _split_step(self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | None) -> torch.Tensor:
        context, inputs = self._prepare_context_parallel_inputs(model, inputs)
        self._set("splits_sequences", False)
        try:
            with context():
                return Stepping.training_step(self, model, inputs, num_items_in_batch)
        finally:
            self._set("splits_sequences", True)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Compute the loss of one batch: the model's own, or that of `compute_loss_func`.

        An override may omit `num_items_in_batch`; its loss is then a mean over the batch. It may return a dict of
        scalars in place of the loss: `{"loss": ..., "ce": ..., "aux": ...}`. `loss` is trained. The other entries are
        logged like the loss, with the same mean over micro-batches, steps and ranks. So the parts of a loss add up in
        the log. In an evaluation they are metrics in addition to `<prefix>_loss`. For other values use `log_metric`.

        Args:
            model: the wrapped model.
            inputs: the batch, on the device.
            return_outputs: also return the outputs of the model.
            num_items_in_batch: the divisor of a summed loss, a scalar tensor.

        Returns:
            A scalar tensor, or a pair of it and the model's outputs.
        """
        function, labels = self.loss_function, None
        if function is not None:
            inputs, labels = self._split_labels(inputs)
        if num_items_in_batch is not None:
            self.loss_rule.is_own_loss = True
            if self.loss_rule.passes_count:
                inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = self.call_model(model, inputs)
        if function is None:
            loss = loss_of(outputs, inputs)
        else:
            extra: dict[str, Any] = {"num_items_in_batch": num_items_in_batch} if self.loss_rule.counts else {}
            loss = function(outputs, labels, **extra)
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> AbstractContextManager[object]:
        """Return a block for forward and loss of a micro-batch, in training and evaluation. Overrides may add to it."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self) -> AbstractContextManager[object]:
        """Return the context of mixed precision; without mixed precision it does nothing."""
        return self.strategy.autocast()

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model gets `num_items_in_batch`; by default its forward's signature decides.

        With False nothing is counted for a model: a loss is a mean over its micro-batch. With True the targets are
        counted, and a loss that does not depend on the count is refused.
        """
        return self.loss_rule.accepts_count

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        self._given_loss_kwargs = bool(value)

    def declared_loss_kwargs(self) -> bool | None:
        """Return the value set for `model_accepts_loss_kwargs`, on this Trainer or in its class; None if not set."""
        in_class = type(self).model_accepts_loss_kwargs
        return self._given_loss_kwargs if isinstance(in_class, property) else self.model_accepts_loss_kwargs

    def call_model(self, model: nn.Module, inputs: Any) -> Any:
        """Call the model with a batch: mappings by keyword, tuples and lists by position."""
        if hasattr(inputs, "keys"):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)

    def loss_and_outputs(self, model: nn.Module, inputs: Any) -> tuple[torch.Tensor, Any]:
        """Compute the loss of one evaluation batch, over its own targets, with the model's outputs."""
        if self.counts_by_override:
            count = self._get_num_items_in_batch([inputs], self.strategy.device)
            count = None if count is None else torch.as_tensor(count, device=self.strategy.device)
        else:
            count = self.loss_rule.count_inputs(inputs) if self.loss_rule.counts else None
        count_argument: dict[str, Any] = {"num_items_in_batch": count} if self._loss_takes_count else {}
        if count_argument and count is not None and self.is_in_evaluation:
            given = count
            if self.loss_rule.asks_in_evaluation(is_own=not self.overrides("compute_loss")):
                self.loss_rule.observe_evaluation(lambda: self._losses_with(model, inputs, given, nullcontext))
        self.loss_rule.is_own_loss = False
        loss, outputs = self.compute_loss(model, inputs, return_outputs=True, **count_argument)
        parts: dict[str, torch.Tensor] = {}
        if isinstance(loss, Mapping):
            loss, parts = split_loss(loss)
        if self.metric_window is not None:
            weight = (batch_size_of(inputs) or 0) if count is None else count
            for name, value in parts.items():
                self.log_metric(name, value, weight)
        return loss, outputs

    def step_of(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return the step function of a run: `training_step`, with what the arguments put around it."""
        if self.args.step_compile != "off":
            step = self.capturing(step)
        return self.counting(step) if self.args.count_flops else step

    def counting(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a step function with which a run counts the operations of its first micro-batch (`count_flops`)."""

        def counted(model: nn.Module, inputs: Any, num_items: torch.Tensor | None) -> torch.Tensor:
            run = self.current_run
            # A loss that is looked at is computed more than once: the next micro-batch is counted.
            with nullcontext() if run is None or self.observes_loss(num_items) else run.counting(inputs):
                return step(model, inputs, num_items)

        return counted

    def capturing(self, step: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a step function that replays a captured micro-batch where it can (`step_compile`)."""

        def captured(model: nn.Module, inputs: Any, num_items: torch.Tensor | None) -> torch.Tensor:
            run = self.current_run
            if run is None or run.capture is None:
                return step(model, inputs, num_items)
            return run.capture.run(step, model, inputs, num_items)

        return captured

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of forward and backward of one batch; 0 if unknown."""
        return self.flop_counter.count(inputs)

    def counts_floating_point_ops(self) -> bool:
        """Whether `floating_point_ops` can count: the model has a count, or a subclass overrides it."""
        return self.flop_counter.knows or self.overrides("floating_point_ops")

    def event_context(self) -> EventContext:
        """Return the current arguments of events, also between the parts of a step."""
        return EventContext(  # by position: a step makes one
            self.args,
            self.state,
            self.control,
            self.model,
            self.processing_class,
            self.optimizer,
            self.lr_scheduler,
            self.loaders,
            self.scope.loss,
        )

    # What the loss is divided by

    def observes_loss(self, num_items: torch.Tensor | None) -> bool:
        """Whether the loss of the current micro-batch is computed twice more, to see what it is divided by."""
        takes_count = num_items is not None and self._loss_takes_count
        return takes_count and self.loss_rule.asks(self.scope.size, self.loss_is_scaled_for_ga)

    def _observe_training(self, model: nn.Module, inputs: Any, num_items: torch.Tensor) -> None:
        targets = self.loss_rule.count_inputs(inputs)
        self.loss_rule.observe(
            lambda: self._losses_with(model, inputs, num_items, self.loss_context),
            has_targets=targets is None or bool(targets),  # sync: until it is known, mostly once a run
            is_scaled=self.loss_is_scaled_for_ga,
        )

    def _first_loss(self, model: nn.Module, inputs: Any, options: dict[str, Any]) -> Any:
        """Call `compute_loss` where it is not known whether it divides by the accumulation itself. Collective.

        It can only if it reads `current_gradient_accumulation_steps`. Then all is put back as it was, the loss is
        looked at, and is computed again for the step.
        """
        rule, scope = self.loss_rule, self.scope
        if self.loss_is_scaled_for_ga is None and self.overrides("compute_loss"):
            rollback, scope.size_was_read = self._rollback(model), False
            with self.loss_context():
                loss = self.compute_loss(model, to_device(inputs, self.strategy.device, copy=True), **options)
            if not any(self.strategy.gather_objects(scope.size_was_read)):
                rule.divides_itself = False
                return loss
            del loss  # and what its backward pass would need
            rollback.restore()
            number = options.get("num_items_in_batch")
            look = functools.partial(self._losses_with, model, inputs, number, self.loss_context, doubles_size=True)
            rule.observe_accumulation(look, is_counted=number is not None)
        else:
            rule.divides_itself = False
        with self.loss_context():
            return self.compute_loss(model, inputs, **options)

    def _rollback(self, model: nn.Module) -> Rollback:
        return Rollback(self.strategy.device, model, self, vars(self), vars(self.state), self.loss_function)

    def _losses_with(
        self,
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
                return self._pair(model, inputs, num_items, context, doubles_size)
        except Exception as error:
            # It may need gradients, a hook, or the memory that compiled code saves.
            self.logger.debug("the loss is looked at in a step like any other: %r", error)
        return self._pair(model, inputs, num_items, context, doubles_size)

    def _pair(
        self,
        model: nn.Module,
        inputs: Any,
        num_items: torch.Tensor | None,
        context: Callable[[], Any],
        doubles_size: bool,
    ) -> Pair:
        own, scope, unit = vars(self), self.scope, 0.0
        size, rollback = scope.size, self._rollback(model)
        doubled = float(size if num_items is None or doubles_size else num_items)
        losses: list[float] = []
        options: dict[str, Any] = (
            {"return_outputs": True} if self.is_in_evaluation or self.callback_handler.wants_outputs else {}
        )
        for factor in (1, 2):
            if self._loss_takes_count:
                options["num_items_in_batch"] = num_items if num_items is None or doubles_size else num_items * factor
            own.update(log=_nothing, log_metric=_nothing)  # undone with the rest
            scope.size = size * factor if doubles_size else size
            try:
                with context():
                    copied = to_device(inputs, self.strategy.device, copy=True)
                    loss = self.compute_loss(model, copied, **options)
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

    def _refuse_gradients_of_zero(self) -> None:
        """Refuse a loss of 0 that has gradients while it is not known what it is divided by. Sync. Collective."""
        strategy, self.loss_rule.was_zero = self.strategy, False
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        # Where gradients are gone already, none is seen.
        hides = strategy.binds_optimizer or (self.optimizer and kind(self.optimizer) == "backward-update")
        has_any = hides or any(bool(local_shard(gradient).any()) for gradient in gradients)
        if any(strategy.gather_objects(has_any)):
            raise ValueError(ZERO_WITH_GRADIENTS)

    def _log_parts(self, parts: dict[str, torch.Tensor], division: Division) -> None:
        """Log what `compute_loss` returned in addition to the loss: this micro-batch's share of the step's values."""
        window, size, ranks = self.scope.metrics, self.scope.size, self.strategy.world_size
        if window is not None:
            for name, value in parts.items():
                share = self.loss_rule.share(value, division, size, self.scope.weight)
                window.add_part(name, share / ranks if ranks > 1 else share, size * ranks)

    def _split_labels(self, inputs: Any) -> tuple[Any, Any]:
        """Split the labels from a batch for `compute_loss_func`: by name, or the last item of a tuple."""
        if isinstance(inputs, list | tuple):
            return inputs[:-1], inputs[-1]
        rest = dict(inputs)
        return rest, rest.pop("labels", None)


def _nothing(*args: Any, **named: Any) -> None:
    """Log nothing."""
