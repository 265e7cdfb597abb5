"""Feed metrics batch by batch, so that no prediction is kept: objects that are updated, and say their value at the end.

Their shape is that of torchmetrics: `update(preds, target)`, `compute()`, `reset()`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from tr_core.evaluation.outputs import map_objects
from tr_core.protocols import Strategy


@runtime_checkable
class StreamingMetric(Protocol):
    """A metric that is updated batch by batch."""

    def update(self, preds: Any, target: Any, /) -> Any:
        """Take in the predictions and labels of a batch, on the device; nothing of them need be kept."""
        ...

    def compute(self) -> Any:
        """Return the value over all batches since `reset`: a number, a tensor, or a mapping of names to such."""
        ...

    def reset(self) -> Any:
        """Forget all batches."""
        ...


def is_streaming(metrics: Any) -> bool:
    """Whether `compute_metrics` is such an object or a mapping of names to such, and not a function.

    An object that can be called with `compute_result` is a function that is told of every batch.
    """
    if isinstance(metrics, StreamingMetric):
        kind: Any = type(metrics)  # of an object whose class is compiled no signature can be had
        return not callable(metrics) or "compute_result" not in inspect.signature(kind.__call__).parameters
    return isinstance(metrics, Mapping)


def check_streaming(metrics: Any) -> None:
    """Raise where something in a mapping of metrics is no metric.

    Raises:
        TypeError: the message names it.
    """
    if isinstance(metrics, StreamingMetric):
        return
    wrong = {name: metric for name, metric in metrics.items() if not isinstance(metric, StreamingMetric)}
    if wrong or not metrics:
        kinds = ", ".join(f"{name!r} is a {type(metric).__name__}" for name, metric in wrong.items())
        raise TypeError(
            "compute_metrics is a mapping, so each of its values must have update(preds, target), compute() and "
            f"reset(); {kinds or 'it is empty'}. A function of all predictions is passed alone, not in a mapping"
        )


class StreamingMetrics:
    """The metrics of one evaluation, forgetting what they saw of an earlier one.

    In several processes a metric of torchmetrics is updated with each process's own samples and combines itself in
    `compute`. Any other metric is updated with the samples of all processes, in the order of the data, in each of
    them: that is right whatever the metric keeps.

    Args:
        metrics: what `is_streaming` says yes to.
        strategy: where to compute, and how values travel.

    Raises:
        ValueError: some metrics of a collection combine themselves and others do not.
    """

    def __init__(self, metrics: Any, strategy: Strategy) -> None:
        self._strategy = strategy
        single = isinstance(metrics, StreamingMetric)
        self._metrics: dict[str, Any] = {"": metrics} if single else dict(metrics)
        self._of_own_rows = {n: m for n, m in self._metrics.items() if strategy.world_size == 1 or combines_itself(m)}
        self._of_all_rows = {n: m for n, m in self._metrics.items() if n not in self._of_own_rows}
        self._was_updated = False
        for metric in self._metrics.values():
            metric.reset()
            if isinstance(metric, nn.Module):
                metric.to(strategy.device)

    def update(self, preds: Any, target: Any, counts: bool, gather: Callable[[Any], Any]) -> None:
        """Feed a batch; without predictions or labels there is nothing to feed.

        Args:
            preds: predictions for this rank's samples.
            target: their labels.
            counts: whether the samples are this rank's own; False where they only fill up.
            gather: joins the samples of all ranks.
        """
        if preds is None or target is None:
            return
        self._was_updated |= counts
        with torch.no_grad():
            if counts:
                for metric in self._of_own_rows.values():
                    metric.update(_readable(preds), _readable(target))
            if self._of_all_rows:
                preds, target = gather(preds), gather(target)
                for metric in self._of_all_rows.values():
                    metric.update(_readable(preds), _readable(target))

    def compute(self) -> dict[str, Any]:
        """Return the values by name, as numbers and lists; empty where no batch had predictions and labels.

        A value of the only metric is named after its class, values of a mapping by its names.

        Raises:
            ValueError: some ranks had no sample, and a metric combines itself, which would then wait for ever.
        """
        had_samples = self._strategy.gather_objects(self._was_updated)
        if not any(had_samples):
            return {}
        if self._of_own_rows and not all(had_samples):
            ranks = ", ".join(str(rank) for rank, had in enumerate(had_samples) if not had)
            raise ValueError(
                f"rank {ranks} of {len(had_samples)} had no sample of this evaluation, and metrics that combine "
                "themselves over processes need one each; evaluate at least as many samples as there are processes"
            )
        values: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            value = metric.compute()  # sync: once an evaluation
            if isinstance(value, Mapping):
                values |= {f"{name}_{key}" if name else str(key): _plain(item) for key, item in value.items()}
            else:
                values[name or type(metric).__name__] = _plain(value)
        return values


def combines_itself(metric: Any) -> bool:
    """Whether a metric combines its state over all processes in `compute`, as those of torchmetrics do.

    Raises:
        ValueError: it is a collection in which some do and some do not.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    parts = list(metric.modules()) if isinstance(metric, nn.Module) else [metric]
    settings = {bool(part.sync_on_compute) for part in parts if hasattr(part, "sync_on_compute")}
    if len(settings) > 1:
        raise ValueError(
            f"of the metrics in {type(metric).__name__} some have sync_on_compute=True and some False; in several "
            "processes give them one value, or pass them apart, in a mapping of names to metrics"
        )
    return settings == {True}


def _readable(tree: Any) -> Any:
    """Turn bfloat16 into float32, as predictions that are kept are."""
    return map_objects(lambda tensor: tensor.float() if tensor.dtype == torch.bfloat16 else tensor, tree)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # tensors and arrays
        return value.tolist()
    return value
