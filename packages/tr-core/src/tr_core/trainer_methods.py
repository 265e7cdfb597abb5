"""Define what the code below the Trainer asks of it: attributes, and methods that a subclass may override."""

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
from tr_core.flops import ModelFacts
from tr_core.loss import LossRule
from tr_core.protocols import Checkpointer, Strategy
from tr_core.random_state import RandomState
from tr_core.state import TrainerControl, TrainerState
from tr_core.step_scope import StepScope


class TrainerMethods(Protocol):
    """Define what a run, an evaluation, a search and a preflight ask of their Trainer.

    Attributes are read at each use: a callback may assign some of them.

    Attributes:
        state: the state of the newest run.
        preprocess_logits_for_metrics: `(logits, labels)` → the outputs to keep of each batch; None to keep the logits.
        model: the unwrapped model.
        model_wrapped: what the strategy's `prepare` returned.
        processing_class: tokenizer or processor, None if there is none.
        step_function: `training_step`, called with the count as third argument.
        inputs_of_schedule: moves a micro-batch to the device, for a strategy that schedules a step itself.
        loaders: the data loaders that callbacks get.
        search: the search whose trial this run is; None for any other run.
        has_assignments: whether an assignment acts from the next step.
        loss_is_scaled_for_ga: what an override of `compute_loss` returns; see `Trainer`.
        whole: what the model was before each process kept some of its layers; None where it keeps them all.
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
    inputs_of_schedule: Callable[..., Any]
    callback_handler: CallbackList
    loaders: dict[str, Any]
    strategy: Strategy
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    label_names: list[str]
    compute_metrics: Any
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    random_state: RandomState
    search: Any
    trial: Any
    has_assignments: bool
    is_in_train: bool
    is_in_evaluation: bool
    optimizer: torch.optim.Optimizer | None
    loss_function: Callable[..., torch.Tensor] | None
    is_checked: bool
    whole: ModelFacts | None
    _loss_takes_count: bool

    loss_is_scaled_for_ga: bool | None
    loss_context: Callable[[], AbstractContextManager[object]]

    @property
    def compute_loss(self) -> Callable[..., Any]:
        """Compute the loss of one batch."""
        ...

    def renew_optimizer(self, num_training_steps: int) -> tuple[torch.optim.Optimizer, LRScheduler]:
        """Set the optimizer and the schedule of a new run."""
        ...

    @property
    def train(self) -> Callable[..., Any]:
        """Train a run."""
        ...

    @property
    def evaluate(self) -> Callable[..., dict[str, float]]:
        """Evaluate, log and return the metrics."""
        ...

    @property
    def evaluation_loop(self) -> Callable[..., Any]:
        """Evaluate data."""
        ...

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Run the wrapped model on one batch without gradients; return loss, logits, labels, each None if missing."""
        ...

    def fire(self, event: str, **extra: Any) -> None:
        """Send an event to the callbacks."""
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

    def meet(self) -> None:
        """Be one of the processes that train together now."""
        ...

    def prepare(self) -> nn.Module:
        """Apply assignments."""
        ...

    def get_train_dataloader(self) -> Any:
        """Build the loader of the training data."""
        ...

    @property
    def training_context(self) -> Callable[..., AbstractContextManager[None]]:
        """Apply the run-wide settings of training inside a block."""
        ...

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int) -> Any:
        """Build a loader of this rank's batches, in the data's own order."""
        ...

    def forget_model(self) -> None:
        """Drop the model, so that the next run builds a new one."""
        ...

    def exchange_checkpointer(self, checkpointer: Checkpointer | None) -> Checkpointer | None:
        """Use another checkpointer, None for a new one, and return the former one."""
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
