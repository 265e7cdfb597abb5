"""Store the target of a preflight, and the results of checks that later checks need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

from tr_core.metric_means import MetricWindow
from tr_core.preflight.origins import Origins
from tr_core.runtime.run_context import align_special_tokens
from tr_core.trainer_methods import TrainerMethods

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
    given_trainer: TrainerMethods | None = None
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
    def trainer(self) -> TrainerMethods:
        """The Trainer, for checks that run only with one."""
        return cast("TrainerMethods", self.given_trainer)

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
