"""Record the best evaluation of a run, and check before training that its metric will be reported."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from tr_args import TrainingArguments
from tr_args.errors import did_you_mean
from tr_args.fields.saving import SavingFields
from tr_core.state import TrainerState


def metric_name(name: str) -> str:
    """Return the key of the metric in an evaluation's result: add `eval_` unless it is there."""
    return name if name.startswith("eval_") else f"eval_{name}"


def record_best(args: SavingFields, state: TrainerState, metrics: dict[str, float]) -> bool:
    """Record the metric that chooses the best model, and return whether this evaluation is the best so far.

    Raises:
        ValueError: the evaluation has no such metric; the message lists its metrics.
    """
    if args.metric_for_best_model is None:
        return False
    value = watched_metric(args, metrics)
    better = operator.gt if args.greater_is_better else operator.lt
    # A NaN is never the best: every later comparison with it would be False.
    if math.isnan(value) or (state.best_metric is not None and not better(value, state.best_metric)):
        return False
    state.best_metric, state.best_global_step = value, state.global_step
    return True


def watched_metric(args: SavingFields, metrics: dict[str, float]) -> float:
    """Return the value of `metric_for_best_model` in an evaluation's result.

    Raises:
        ValueError: the metric is missing or no number; the message lists the metrics.
    """
    name: Any = args.metric_for_best_model
    if name is None:  # a best model is chosen only by a metric, so this is for a schedule that the user passed
        raise ValueError(
            "the schedule is stepped with a metric of each evaluation, and metric_for_best_model is None; name the "
            "metric, as metric_for_best_model='loss'"
        )
    key = metric_name(name)
    if key not in metrics:
        raise ValueError(
            f"metric_for_best_model={name!r} is not among the results of the evaluation; they are {sorted(metrics)}"
            f"{did_you_mean(key, metrics)}"
        )
    if not isinstance(metrics[key], int | float):
        raise ValueError(f"metric_for_best_model={name!r} needs a metric that is one number; {key} is {metrics[key]!r}")
    return metrics[key]


def check_best_metric(args: TrainingArguments, eval_dataset: Any) -> None:
    """Raise, before training, if no evaluation can report the metric that chooses the best model.

    This is known only if nothing adds metrics (see `may_add_metrics`). Otherwise the first evaluation raises.
    """
    if args.metric_for_best_model is None or args.eval_strategy == "no":
        return
    prefixes = [f"eval_{name}" for name in eval_dataset] if isinstance(eval_dataset, dict) else ["eval"]
    results = ["loss", "runtime", "samples_per_second", "steps_per_second", *["perplexity"] * args.eval_perplexity]
    known = [f"{prefix}_{result}" for prefix in prefixes for result in results]
    if metric_name(args.metric_for_best_model) not in known:
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} will not be among the results of an evaluation: "
            f"without compute_metrics they are {', '.join(known)}; name one of them, or pass compute_metrics"
        )


def may_add_metrics(overrides: Callable[..., bool], callbacks: Iterable[Any], functions: Iterable[Any]) -> bool:
    """Whether user code in an evaluation may add metrics to its result."""
    callbacks = list(callbacks)
    return (
        adds_to_results(overrides, callbacks)
        or any(function is not None for function in functions)
        or overrides("evaluation_loop", "prediction_step", "compute_loss")
        or _listens(callbacks, "on_prediction_step")
    )


def adds_to_results(overrides: Callable[..., bool], callbacks: Iterable[Any]) -> bool:
    """Whether a user's override or callback may add metrics after the evaluation loop."""
    return overrides("evaluate", "log") or _listens(callbacks, "on_evaluate", "on_log")


def _listens(callbacks: Iterable[Any], *events: str) -> bool:
    """Whether a user's callback defines one of the events; callbacks of these packages add nothing."""
    return any(not _is_ours(getattr(callback, event, _is_ours)) for callback in callbacks for event in events)


def _is_ours(function: Any) -> bool:
    return getattr(function, "__module__", "").startswith(("tr_core.", "tr_log.", "tr_ckpt.", "tr_optim."))
