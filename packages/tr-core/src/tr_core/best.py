"""Keep track of the best evaluation of a run."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


def metric_name(name: str) -> str:
    """Return the key under which an evaluation reports the metric: `eval_` comes before it unless it is there."""
    return name if name.startswith("eval_") else f"eval_{name}"


def note_best(trainer: Trainer, metrics: dict[str, float]) -> bool:
    """Record the metric that chooses the best model, and say whether this evaluation is the best so far.

    Raises:
        ValueError: the evaluation has no such metric; the message lists those it has.
    """
    args, state = trainer.args, trainer.state
    if args.metric_for_best_model is None:
        return False
    value = watched_metric(trainer, metrics)
    better = operator.gt if args.greater_is_better else operator.lt
    # A NaN is never the best: every later comparison with it would be false.
    if math.isnan(value) or (state.best_metric is not None and not better(value, state.best_metric)):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def watched_metric(trainer: Trainer, metrics: dict[str, float]) -> float:
    """Return the value of `metric_for_best_model` in an evaluation's result.

    Raises:
        ValueError: it is not there; the message lists what is.
    """
    key = metric_name(trainer.args.metric_for_best_model)
    if key not in metrics:
        raise ValueError(
            f"metric_for_best_model={trainer.args.metric_for_best_model!r} is not among the results of the "
            f"evaluation; they are {sorted(metrics)}"
        )
    return metrics[key]
