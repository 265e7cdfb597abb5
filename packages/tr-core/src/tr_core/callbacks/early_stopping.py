"""Stop a run whose evaluations no longer get better."""

from __future__ import annotations

import operator
from typing import Any

from tr_core.callback import TrainerCallback
from tr_core.state import TrainerControl, TrainerState


class EarlyStoppingCallback(TrainerCallback):
    """Stop after `early_stopping_patience` evaluations in a row without improvement.

    Args:
        early_stopping_patience: evaluations without improvement after which the run ends, at least 1.
        early_stopping_threshold: how much better than the best so far counts as improvement, at least 0.

    Which metric and which direction are those of `metric_for_best_model` and `greater_is_better`. With several
    evaluation data sets only the results that hold the metric count. The counter is saved with every checkpoint.

    Raises:
        ValueError: at the beginning of training, if there is no evaluation or no metric to watch.
    """

    def __init__(self, early_stopping_patience: int = 1, early_stopping_threshold: float = 0.0) -> None:
        if early_stopping_patience < 1:
            raise ValueError(f"early_stopping_patience={early_stopping_patience} must be at least 1")
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_threshold = early_stopping_threshold
        self.early_stopping_patience_counter = 0

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check that there is something to watch."""
        if args.metric_for_best_model is None or args.eval_strategy == "no":
            raise ValueError(
                f"EarlyStoppingCallback has nothing to watch: metric_for_best_model={args.metric_for_best_model!r}, "
                f"eval_strategy={str(args.eval_strategy)!r}; set both, as in metric_for_best_model='loss', "
                "eval_strategy='epoch'"
            )

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Compare with the best *before* this evaluation, count, and stop the run when patience is used up."""
        name = args.metric_for_best_model
        name = name if name.startswith("eval_") else f"eval_{name}"
        value = kwargs["metrics"].get(name)
        if value is None:
            return
        better = operator.gt if args.greater_is_better else operator.lt
        best = state.best_metric
        if best is None or (better(value, best) and abs(value - best) > self.early_stopping_threshold):
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1
        if self.early_stopping_patience_counter >= self.early_stopping_patience:
            control.should_training_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return the counter."""
        return {"early_stopping_patience_counter": self.early_stopping_patience_counter}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over the counter."""
        self.early_stopping_patience_counter = state_dict["early_stopping_patience_counter"]
