"""Store the target of a preflight, and the results of checks that later checks need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tr_core.metric_means import MetricWindow
from tr_core.preflight.origins import Origins
from tr_core.protocols import Checkpointer, Strategy
from tr_core.runtime.run_context import align_special_tokens
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
    processing_class: Any
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


SAMPLES = 2
"""Number of samples in the trial of the model."""


@dataclass
class CheckContext:
    """The target and the results of a preflight.

    Attributes:
        given_trainer: the Trainer; None if only arguments are checked.
        origin: returns where an option was written.
        resume: the checkpoint to resume from, as given to `train` or in the arguments.
        trains: whether training would begin, so that there must be training data.
        ends_here: whether the process ends with the preflight, so that data may be used up.
        progress: called with a line of text before each slow check.
        inputs: a batch of two training samples, on the host; None if there is none.
        classes: number of classes that labels can name; None if unknown.
        gives_loss: whether the trial returned a loss with a gradient.
    """

    args: Any
    given_trainer: CheckedTrainer | None = None
    origin: Origins = field(default_factory=Origins)
    resume: Any = None
    evaluation_data: Any = None
    trains: bool = True
    ends_here: bool = False
    progress: Callable[[str], None] = lambda text: None
    callbacks: list[Any] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    epochs: int | None = None
    inputs: Any = None
    classes: int | None = None
    gives_loss: bool = False
    optimizer: Any = None

    @property
    def trainer(self) -> CheckedTrainer:
        """The Trainer, for checks that run only with one."""
        return cast("CheckedTrainer", self.given_trainer)

    def evaluation_sets(self) -> dict[str, Any]:
        """Return the evaluation data by the prefix of its metrics."""
        data = self.evaluation_data
        if data is None and self.given_trainer is not None:
            data = self.given_trainer.eval_dataset
        if isinstance(data, str):
            return {f"eval_{data}": self.trainer.eval_dataset[data]}
        if data is None:
            return {}
        if isinstance(data, dict):
            return {f"eval_{name}": dataset for name, dataset in data.items()}
        return {"eval": data}


@contextmanager
def training_mode(subject: CheckContext, *, with_conditions: bool = True) -> Iterator[None]:
    """Put the Trainer into its mid-training state inside the block: step number, metric window, run-wide settings."""
    trainer = subject.trainer
    trainer.is_in_train, trainer.scope.metrics = True, MetricWindow(trainer.strategy)
    trainer.state.max_steps = subject.steps or 0
    aligned = align_special_tokens(trainer.model, trainer.processing_class) if with_conditions else []
    try:
        with trainer.training_context() if with_conditions else nullcontext():
            yield
    finally:
        for config, name, value in aligned:
            setattr(config, name, value)
        trainer.is_in_train, trainer.scope.metrics = False, None
