"""Stop a run whose evaluations no longer improve."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, Self

from tr_args import TrainingArguments
from tr_core.callback import TrainerCallback
from tr_core.evaluation.best_metric import metric_name
from tr_core.state import TrainerControl, TrainerState
from tr_log import get_logger

logger = get_logger(__name__)


class EarlyStoppingCallback(TrainerCallback):
    """Stop after `early_stopping_patience` evaluations in a row without improvement.

    Args:
        early_stopping_patience: evaluations without improvement after which the run ends, at least 1.
        early_stopping_threshold: how much better than the best so far counts as improvement, at least 0.

    `metric_for_best_model` and `greater_is_better` give the metric and the direction. With several evaluation data
    sets, only the results that hold the metric count. For a dict of data sets, prefix the metric with the name of one
    (`metric_for_best_model="english_loss"`). A metric that is NaN is not an improvement. Every checkpoint holds the
    counter; a run that is not resumed begins at 0. Resuming a run that was stopped here does not continue it.

    Raises:
        ValueError: an argument is out of its range; or, at the beginning of training, there is no evaluation or no
            metric to watch.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        if early_stopping_patience < 1:
            raise ValueError(f"early_stopping_patience={early_stopping_patience} must be at least 1")
        if not early_stopping_threshold >= 0:
            raise ValueError(f"early_stopping_threshold={early_stopping_threshold} must be at least 0")
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that there is a metric; reset the counter, or stop a resumed run that was stopped here before."""
        if args.metric_for_best_model is None or args.eval_strategy == "no":
            raise ValueError(
                f"EarlyStoppingCallback has nothing to watch: metric_for_best_model={args.metric_for_best_model!r}, "
                f"eval_strategy={str(args.eval_strategy)!r}; set both, as in metric_for_best_model='loss', "
                "eval_strategy='epoch'"
            )
        if state.global_step == 0:
            self.early_stopping_patience_counter = 0
        elif self.early_stopping_patience_counter >= self.early_stopping_patience:
            logger.info(
                "the run had %d evaluations without improvement up to step %d, which ended it; a larger "
                "early_stopping_patience than %d continues it",
                self.early_stopping_patience_counter,
                state.global_step,
                self.early_stopping_patience,
            )
            control.should_training_stop = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Compare with the best *before* this evaluation, count, and stop the run when patience is used up."""
        value = kwargs["metrics"].get(metric_name(args.metric_for_best_model or ""))
        if not isinstance(value, int | float):
            return
        self.check_metric_value(args, state, control, value)
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def check_metric_value(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metric_value: float
    ) -> None:
        """Count an evaluation without improvement, or begin to count again; a subclass may judge otherwise."""
        value = metric_value
        better = operator.gt if args.greater_is_better else operator.lt
        best = value if state.best_metric is None else state.best_metric
        is_first = state.best_metric is None and not math.isnan(value)
        if is_first or (better(value, best) and abs(value - best) > self.early_stopping_threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    def state(self) -> dict[str, dict[str, Any]]:
        """Return the arguments and the counter, in the form of an `ExportableState` of transformers."""
        given = ("early_stopping_patience", "early_stopping_threshold")
        return {"args": {name: getattr(self, name) for name in given}, "attributes": self.state_dict()}

    @classmethod
    def from_state(cls, state: Mapping[str, Mapping[str, Any]]) -> Self:
        """Return a callback with the arguments and the counter that `state` returned."""
        callback = cls(**state["args"])
        vars(callback).update(state["attributes"])
        return callback

    def state_dict(self) -> dict[str, Any]:
        """Return the counter."""
        return {"early_stopping_patience_counter": self.early_stopping_patience_counter}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load the counter."""
        self.early_stopping_patience_counter = state_dict["early_stopping_patience_counter"]
