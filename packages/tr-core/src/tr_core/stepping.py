"""One micro-batch: from a batch to its loss and gradients, in methods that a subclass may override."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tr_core.assembly import Assembly
from tr_core.model_io import loss_of, to_device


class Stepping(Assembly):
    """What is done with one micro-batch."""

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute loss and gradients of one micro-batch.

        Args:
            model: the wrapped model, in training mode.
            inputs: the batch, with tensors on the host.
            num_items_in_batch: targets of the whole step over all ranks, a scalar tensor; None where not counted.

        Returns:
            This micro-batch's share of the step's loss, detached, on the device: nothing is read back.
        """
        inputs = to_device(inputs, self.strategy.device)
        count = {}
        if num_items_in_batch is not None and self._loss_takes_count:
            count = {"num_items_in_batch": self.loss_rule.hand_over(num_items_in_batch)}
        with self.strategy.autocast():
            loss = self.compute_loss(model, inputs, **count)
        if count or self.micro_batches_in_step > 1 or self.micro_batch_weight != 1.0:
            loss = self.loss_rule.normalise(loss, bool(count), self.micro_batches_in_step, self.micro_batch_weight)
        self.strategy.backward(loss)
        return loss.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Any:
        """Compute the loss of one batch: the model's own, or that of `compute_loss_func`.

        An override may leave out `num_items_in_batch`; its loss is then a mean over the batch.

        Args:
            model: the wrapped model.
            inputs: the batch, on the device.
            return_outputs: also return what the model gave.
            num_items_in_batch: what a summed loss is to be divided by, a scalar tensor.

        Returns:
            A scalar tensor, or a pair of it and the model's outputs.
        """
        function, labels = self.loss_function, None
        if function is not None:
            inputs, labels = self._split_labels(inputs)
        if num_items_in_batch is not None and self.loss_rule.tells_model:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        outputs = self.call_model(model, inputs)
        if function is None:
            loss = loss_of(outputs, inputs)
        else:
            extra = {"num_items_in_batch": num_items_in_batch} if self.loss_rule.counts else {}
            loss = function(outputs, labels, **extra)
        return (loss, outputs) if return_outputs else loss

    def call_model(self, model: nn.Module, inputs: Any) -> Any:
        """Call the model with a batch: mappings by keyword, tuples and lists by position."""
        if hasattr(inputs, "keys"):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, list | tuple) else model(inputs)

    def loss_and_outputs(self, model: nn.Module, inputs: Any) -> tuple[torch.Tensor, Any]:
        """Compute the loss of one evaluation batch, over its own targets, with the model's outputs."""
        if not self._loss_takes_count:
            return self.compute_loss(model, inputs, return_outputs=True)
        count = self.loss_rule.count_inputs(inputs) if self.loss_rule.counts else None
        return self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=count)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of forward and backward of one batch; 0 where not known."""
        return self.flop_counter.count(inputs)

    def counts_floating_point_ops(self) -> bool:
        """Whether `floating_point_ops` can say anything: the model tells, or a subclass does."""
        return self.flop_counter.knows or type(self).floating_point_ops is not Stepping.floating_point_ops

    def _split_labels(self, inputs: Any) -> tuple[Any, Any]:
        """Take the labels out of a batch for `compute_loss_func`: by name, or the last of a tuple."""
        if isinstance(inputs, list | tuple):
            return inputs[:-1], inputs[-1]
        rest = dict(inputs)
        return rest, rest.pop("labels", None)
