"""Declare the attributes and methods of a Trainer that a preflight uses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_core.protocols import Checkpointer, Strategy
from tr_core.state import TrainerState


class CheckedTrainer(Protocol):
    """The parts of a Trainer that a preflight checks: data, model, loss, optimizer and overridable methods.

    The attributes and methods are those of `Trainer`.
    """

    args: Any
    strategy: Strategy
    model: nn.Module
    model_wrapped: nn.Module
    state: TrainerState
    lr_scheduler: LRScheduler | None
    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    label_names: list[str]
    callback_handler: Any
    compute_metrics: Any
    loss_rule: Any
    step_function: Callable[..., torch.Tensor]
    scope: Any
    is_in_train: bool
    is_checked: bool
    _loss_takes_count: bool

    @property
    def compute_loss(self) -> Callable[..., Any]:
        """Compute the loss of one batch."""
        ...

    @property
    def create_optimizer(self) -> Callable[..., torch.optim.Optimizer]:
        """Build the optimizer, unless there is one."""
        ...

    @property
    def create_scheduler(self) -> Callable[..., LRScheduler]:
        """Build the schedule, unless there is one."""
        ...

    @property
    def evaluation_loop(self) -> Callable[..., Any]:
        """Evaluate data."""
        ...

    @property
    def get_train_dataloader(self) -> Callable[..., Any]:
        """Build the loader of the training data."""
        ...

    def _get_collator_with_removed_columns(self, data_collator: Any) -> Callable[..., Any]: ...

    def overrides(self, *names: str) -> bool:
        """Whether a user replaced one of the methods of these names."""
        ...

    def prepare(self) -> nn.Module:
        """Return the model, wrapped by the strategy."""
        ...

    @property
    def training_context(self) -> Callable[..., AbstractContextManager[None]]:
        """Apply the run-wide settings of training inside a block."""
        ...

    def checkpointer(self) -> Checkpointer:
        """Return the checkpointer of the run."""
        ...

    @property
    def get_num_trainable_parameters(self) -> Callable[..., int]:
        """Count the trainable parameters."""
        ...
