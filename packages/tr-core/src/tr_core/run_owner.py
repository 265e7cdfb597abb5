"""Define what one call of `train` needs from its owner, a Trainer, and from the part `settings` of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_args import TrainingArguments
from tr_core.callback import CallbackList
from tr_core.data.batches import TakeBatches
from tr_core.loss import LossRule, StepScope
from tr_core.protocols import Checkpointer, Stateful
from tr_core.random_state import RandomState
from tr_core.state import TrainerControl, TrainerState


class RunMethods(Protocol):
    """Define what one call of `train` needs from its owner, whose methods a subclass may override.

    The run reads attributes at each use: a callback may assign some of them.

    Attributes:
        model: the unwrapped model.
        model_wrapped: what the strategy's `prepare` returned.
        processing_class: tokenizer or processor, None if there is none.
        step_function: `training_step`, called with the count as third argument.
        loaders: the data loaders that callbacks get.
        search: the search whose trial this run is; None for any other run.
        has_assignments: whether an assignment acts from the next step.
        loss_is_scaled_for_ga: what an override of `compute_loss` returns; see `Trainer`.
        loss_context: returns the block for forward and loss of a micro-batch.
        has_own_layout: whether an override writes the model's files of a checkpoint.
    """

    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    model: nn.Module
    model_wrapped: nn.Module
    lr_scheduler: LRScheduler | None
    processing_class: Any
    loss_rule: LossRule
    scope: StepScope
    step_function: Callable[..., torch.Tensor]
    callback_handler: CallbackList
    loaders: dict[str, Any]
    train_dataset: Any
    random_state: RandomState
    search: Any
    trial: Any
    has_assignments: bool

    loss_is_scaled_for_ga: bool | None
    loss_context: Callable[[], AbstractContextManager[object]]

    def compute_loss(self, model: nn.Module, inputs: Any, *, num_items_in_batch: torch.Tensor | None = None) -> Any:
        """Compute the loss of one batch."""
        ...

    def overrides(self, *names: str) -> bool:
        """Whether a user replaced one of these methods."""
        ...

    @property
    def has_own_layout(self) -> bool:
        """Whether an override writes the model's files of a checkpoint."""
        ...

    @property
    def has_given_optimizer(self) -> bool:
        """Whether the optimizer was passed or assigned."""
        ...

    @property
    def has_given_schedule(self) -> bool:
        """Whether the schedule was passed or assigned."""
        ...

    def optimizer_in_evaluation(self) -> AbstractContextManager[None]:
        """Swap in the evaluation weights of an optimizer that has two sets of weights, inside a block."""
        ...

    def prepare(self) -> nn.Module:
        """Apply assignments."""
        ...

    def get_train_dataloader(self) -> Any:
        """Build the loader of the training data."""
        ...

    def evaluate(self, *, ignore_keys: list[str] | None = None) -> dict[str, float]:
        """Evaluate, log and return the metrics."""
        ...

    def report_trial(self, metrics: dict[str, float]) -> None:
        """Report the metrics of an evaluation to the search."""
        ...

    def taking(self) -> TakeBatches | None:
        """Return what takes the batches of a step by an override."""
        ...

    def after_step(self) -> Callable[[Any], None] | None:
        """Return what runs what is due after a step by an override."""
        ...

    def _evaluate(self, trial: Any, ignore_keys_for_eval: list[str] | None) -> dict[str, float]:
        """Evaluate, and report to the search."""
        ...

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        """Record the best, and return whether this is it."""
        ...

    def log(self, logs: dict[str, Any]) -> None:
        """Add an entry to the log."""
        ...

    def save_checkpoint(self, run: Any) -> None:
        """Save everything that the run needs to continue."""
        ...

    def checkpointer(self) -> Checkpointer:
        """Return the checkpointer of the run."""
        ...

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of forward and backward of one batch."""
        ...

    def counts_floating_point_ops(self) -> bool:
        """Whether `floating_point_ops` can count anything."""
        ...


class RunSettings(Stateful, Protocol):
    """Save and restore the part `settings` of a run's checkpoints."""

    def record_changes(self) -> None:
        """Record what a callback changed in the optimizer and the schedule."""
        ...
