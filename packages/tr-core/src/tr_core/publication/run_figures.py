"""Read from a run's log what became of it: its evaluations, and the figures of the model that it left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tr_core.state import TrainerState

# What an evaluation reports of itself, not of the model.
_OF_THE_RUN = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")
_PREFIX = "eval_"


@dataclass
class EvaluationFigures:
    """What the evaluations at one step gave.

    Attributes:
        step: completed optimizer steps.
        epoch: passes over the data, as a fraction.
        training_loss: the one logged last before; None if there was none.
        metrics: metrics by name, without `eval_`.
    """

    step: int
    epoch: float | None
    training_loss: float | None
    metrics: dict[str, Any] = field(default_factory=dict)


def evaluations(history: Iterable[dict[str, Any]]) -> list[EvaluationFigures]:
    """Return the evaluations of a log, in order; those of several data sets at one step are one."""
    found: list[EvaluationFigures] = []
    loss = None
    for entry in history:
        loss = entry.get("loss", loss)
        metrics = {
            name.removeprefix(_PREFIX): value
            for name, value in entry.items()
            if name.startswith(_PREFIX) and not name.endswith(_OF_THE_RUN) and "_mem_" not in name
        }
        if not metrics:
            continue
        if not found or found[-1].step != entry["step"]:
            found.append(EvaluationFigures(entry["step"], entry.get("epoch"), loss))
        found[-1].metrics.update(metrics)
    return found


def in_training(state: TrainerState) -> list[EvaluationFigures]:
    """Return the evaluations that were made before the end of training."""
    return evaluations(state.log_history[: _end(state)])


def of_the_model(state: TrainerState, has_best_weights: bool) -> EvaluationFigures | None:
    """Return the figures of the model as the run left it, None if there are none.

    Those of an evaluation after the end of training; else those of the best step, if the weights are of that, or of
    the last evaluation.

    Args:
        state: the run's state.
        has_best_weights: whether the best weights were loaded at the end.
    """
    if after := evaluations(state.log_history[_end(state) :]):
        return after[-1]
    during = in_training(state)
    if has_best_weights and state.best_global_step is not None:
        during = [figures for figures in during if figures.step == state.best_global_step]
    return during[-1] if during else None


def _end(state: TrainerState) -> int:
    """Return the place of the entry with which training ended; without one, the log's length."""
    places = [place for place, entry in enumerate(state.log_history) if "train_runtime" in entry]
    return places[-1] if places else len(state.log_history)
