"""Record the best evaluation of a run, and check before training that its metric will be reported."""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tr_core.trainer.trainer import Trainer


def metric_name(name: str) -> str:
    """Return the key under which an evaluation reports the metric: `eval_` comes before it unless it is there."""
    return name if name.startswith("eval_") else f"eval_{name}"


def record_best(trainer: Trainer, metrics: dict[str, float]) -> bool:
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
        ValueError: it is not there, or no number; the message lists what is there.
    """
    name: Any = trainer.args.metric_for_best_model  # set where a best model is chosen
    key = metric_name(name)
    if key not in metrics:
        raise ValueError(
            f"metric_for_best_model={name!r} is not among the results of the evaluation; they are {sorted(metrics)}"
        )
    if not isinstance(metrics[key], int | float):
        raise ValueError(f"metric_for_best_model={name!r} needs a metric that is one number; {key} is {metrics[key]!r}")
    return metrics[key]


def check_best_metric(trainer: Trainer) -> None:
    """Raise, before anything is trained, if no evaluation can give the metric that chooses the best model.

    That can be known only where nothing adds metrics: no `compute_metrics`, and no override, function or callback of
    the user's that is part of an evaluation. Else the first evaluation says so.

    Raises:
        ValueError: the message lists the metrics that there will be.
    """
    args = trainer.args
    if args.metric_for_best_model is None or args.eval_strategy == "no" or _may_add_metrics(trainer):
        return
    datasets = trainer.eval_dataset
    prefixes = [f"eval_{name}" for name in datasets] if isinstance(datasets, dict) else ["eval"]
    results = ["loss", "runtime", "samples_per_second", "steps_per_second", *["perplexity"] * args.eval_perplexity]
    known = [f"{prefix}_{result}" for prefix in prefixes for result in results]
    if metric_name(args.metric_for_best_model) not in known:
        raise ValueError(
            f"metric_for_best_model={args.metric_for_best_model!r} will not be among the results of an evaluation: "
            f"without compute_metrics they are {', '.join(known)}; name one of them, or pass compute_metrics"
        )


def _may_add_metrics(trainer: Trainer) -> bool:
    if adds_to_results(trainer):
        return True
    functions = (trainer.compute_metrics, trainer.compute_loss_func, trainer.preprocess_logits_for_metrics)
    return (
        any(function is not None for function in functions)
        or _overrides(trainer, "evaluation_loop", "prediction_step", "compute_loss")
        or _listens(trainer, "on_prediction_step")
    )


def adds_to_results(trainer: Trainer) -> bool:
    """Whether an override or a callback of the user's may add metrics once an evaluation has gone through its data."""
    return _overrides(trainer, "evaluate", "log") or _listens(trainer, "on_evaluate", "on_log")


def _overrides(trainer: Trainer, *methods: str) -> bool:
    return any(not _is_ours(getattr(trainer, name)) for name in methods)


def _listens(trainer: Trainer, *events: str) -> bool:
    return any(
        not _is_ours(getattr(callback, event, _is_ours))
        for callback in trainer.callback_handler.callbacks
        for event in events
    )


def _is_ours(function: Any) -> bool:
    return getattr(function, "__module__", "").startswith(("tr_core.", "tr_log.", "tr_ckpt.", "tr_optim."))
