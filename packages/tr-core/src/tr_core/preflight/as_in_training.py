"""Have a Trainer be as it is in the middle of training, for a trial of its methods."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from tr_core.conditions.surroundings import while_training
from tr_core.metric_window import MetricWindow
from tr_core.preflight.subject import Subject


@contextmanager
def as_in_training(subject: Subject, *, with_conditions: bool = True) -> Iterator[None]:
    """Have a step number, a window for logged metrics, and what the arguments ask of the model, inside the block.

    Args:
        subject: what is examined.
        with_conditions: compile the model, compute activations again and so on, as the arguments say.
    """
    trainer = subject.trainer
    trainer.is_in_train, trainer.metric_window = True, MetricWindow(trainer.strategy)
    trainer.state.max_steps = subject.steps or 0
    try:
        with while_training(trainer) if with_conditions else nullcontext():
            yield
    finally:
        trainer.is_in_train, trainer.metric_window = False, None
