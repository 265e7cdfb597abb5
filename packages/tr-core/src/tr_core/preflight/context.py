"""Hold what a preflight checks, and the results of checks that later checks need.

A Trainer can also be put into its mid-training state for a dry run of its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from tr_core.metric_means import MetricWindow
from tr_core.preflight.checked_trainer import CheckedTrainer
from tr_core.preflight.origins import Origins

SAMPLES = 2
"""Samples that the model is tried with."""


@dataclass
class CheckContext:
    """What is examined.

    Attributes:
        args: the training arguments.
        given_trainer: the Trainer; None where only arguments are known.
        origin: says where an option was written.
        resume: what the run is to resume from, as `train` was told or the arguments say.
        evaluation_data: data to be evaluated that is not the Trainer's own.
        trains: whether training would begin, so that there must be training data.
        ends_here: whether the process ends with the preflight, so that data may be used up.
        progress: is told what takes time.
        callbacks: the Trainer's callbacks, which are not called meanwhile.
        figures: what was measured and reckoned.
        steps: optimizer steps of the run; None if unknown.
        epochs: passes over the data; None if unknown.
        inputs: a batch of two training samples, on the host; None if there is none.
        classes: number of classes that labels can name; None if unknown.
        gives_loss: whether the trial gave a loss with a gradient.
        optimizer: an optimizer as the run would build it; None if there is none.
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
        """The Trainer, for checks that are made only where there is one."""
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
    """Have a step number, a window for logged metrics, and what the arguments ask of the model, inside the block.

    Args:
        subject: what is examined.
        with_conditions: compile the model, compute activations again and so on, as the arguments say.
    """
    trainer = subject.trainer
    trainer.is_in_train, trainer.scope.metrics = True, MetricWindow(trainer.strategy)
    trainer.state.max_steps = subject.steps or 0
    try:
        with trainer.training_context() if with_conditions else nullcontext():
            yield
    finally:
        trainer.is_in_train, trainer.scope.metrics = False, None
