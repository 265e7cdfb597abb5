"""Evaluate two samples, to determine which metrics the run will report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from tr_args.errors import did_you_mean
from tr_core.data.fetch import identity
from tr_core.data.sampler import has_length
from tr_core.evaluation.best_metric import adds_to_results, metric_name
from tr_core.evaluation.metrics import is_streaming
from tr_core.preflight.context import SAMPLES, CheckContext
from tr_core.preflight.data_checks import collate
from tr_core.preflight.origins import last_line, passed_through, raised_at
from tr_core.preflight.report import Problem

_MORE_SAMPLES = 64
"""Number of samples for metrics that cannot be computed from two samples."""
_MEASURED = ("runtime", "samples_per_second", "steps_per_second")
"""Entries that every evaluation reports beside the metrics."""


def check_evaluation(subject: CheckContext) -> Iterator[Problem]:
    """Run `compute_metrics` on two evaluation samples, and check for the metric of the best model."""
    results: dict[str, Any] = {}
    complete = True
    for prefix, dataset in subject.evaluation_sets().items():
        if has_length(dataset) and len(dataset) == 0:
            yield Problem("T407", f"the evaluation data ({prefix}) is empty; add data, or set eval_strategy='no'")
            complete = False
            continue
        subject.progress(f"evaluating two samples ({prefix})")
        found = len(results)
        yield from _evaluate(subject, prefix, dataset, results)
        complete = complete and len(results) > found
    if results:
        subject.figures["metrics"] = sorted(results)
    if complete and results and subject.args.eval_strategy != "no":
        yield from _watched(subject, results)


def _evaluate(subject: CheckContext, prefix: str, dataset: Any, results: dict[str, Any]) -> Iterator[Problem]:
    error: Exception | None = None
    for number in (SAMPLES, _MORE_SAMPLES):
        batch: list[Any] = []
        problems = list(collate(subject, dataset, "evaluation", batch, number))
        if problems or not batch:
            yield from problems
            return
        try:
            results.update(_metrics(subject, prefix, batch))
            return
        except Exception as caught:
            error = caught
    if error is not None:
        yield _explain(subject, error, prefix)


def _metrics(subject: CheckContext, prefix: str, batches: list[Any]) -> dict[str, Any]:
    trainer = subject.trainer
    loader = DataLoader(batches, batch_size=None, collate_fn=identity)  # type: ignore[arg-type]  a list will do
    loss_only = True if trainer.compute_metrics is None or is_streaming(trainer.compute_metrics) else None
    return trainer.evaluation_loop(
        loader, description="Preflight", prediction_loss_only=loss_only, ignore_keys=None, metric_key_prefix=prefix
    ).metrics


def _explain(subject: CheckContext, error: Exception, prefix: str) -> Problem:
    compute = subject.trainer.compute_metrics
    name = getattr(compute, "__name__", type(compute).__name__)
    functions = ("update", "compute") if is_streaming(compute) else (_function_name(compute),)
    if any(passed_through(error, function) for function in functions):
        return Problem(
            "T602", f"{name} fails on {_MORE_SAMPLES} evaluation samples: {last_line(error)}", raised_at(error)
        )
    return Problem("T604", f"evaluating ({prefix}) fails: {last_line(error)}", raised_at(error))


def _function_name(compute: Any) -> str:
    return compute.__code__.co_name if hasattr(compute, "__code__") else "__call__"


def _watched(subject: CheckContext, results: dict[str, Any]) -> Iterator[Problem]:
    watched = subject.args.metric_for_best_model
    if watched is None:
        return
    key, origin = metric_name(watched), subject.origin("metric_for_best_model")
    measured = [f"{prefix}_{name}" for prefix in subject.evaluation_sets() for name in _MEASURED]
    if key not in results and key not in measured:
        trainer = subject.trainer
        if adds_to_results(trainer.overrides, trainer.callback_handler.callbacks):
            return  # only a full evaluation can determine it
        hint = did_you_mean(key, results)
        yield Problem(
            "T601",
            f"metric_for_best_model={watched!r} needs {key!r}, which is not among the results of an evaluation: "
            f"{', '.join(sorted(results))}{hint}",
            origin,
        )
    elif key in results and not isinstance(results[key], int | float):
        yield Problem("T603", f"metric_for_best_model={watched!r} is {results[key]!r}; it must be a number", origin)
