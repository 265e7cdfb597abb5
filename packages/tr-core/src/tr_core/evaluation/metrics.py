"""Compute the loss and the metrics of an evaluation batch by batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from tr_args import TrainingArguments
from tr_core.evaluation.gather import map_objects
from tr_core.loss import LossRule
from tr_core.model_io import to_device, to_plain
from tr_core.protocols import Collectives
from tr_core.signatures import names_argument

# Losses of this many batches are joined into one tensor: a scalar on an accelerator takes half a kilobyte.
_CHUNK = 1024
_NO_MEAN_OVER_TOKENS = (
    "eval_perplexity=True needs a mean over tokens, but the loss does not depend on num_items_in_batch, the number of "
    "tokens: it is not a mean over tokens. Divide a summed loss by num_items_in_batch, or set eval_perplexity=False"
)
_WEIGHTS_UNKNOWN = (
    "the loss of this evaluation is {} if its batches count by their samples and {} if they count by their targets, "
    "and which it is cannot be seen: twice the num_items_in_batch gives neither half of a batch's loss nor the same, "
    "or the loss is 0. If it is a mean over targets, divide a sum by num_items_in_batch; if not, do not use the count "
    "in an evaluation (model.training is False), or train first"
)


class EvaluationLoss:
    """Collects the losses of an evaluation's batches, on the device until `metrics` reads them.

    A batch is weighted by its targets if its loss, or that of training, depends on their number. Otherwise it is
    weighted by its samples. The mean does not depend on the batch size.
    """

    def __init__(self, args: TrainingArguments, strategy: Collectives, rule: LossRule, *, takes_count: bool) -> None:
        self._args, self._strategy, self._rule, self._takes_count = args, strategy, rule, takes_count
        self._by_targets: set[bool | None] = set()
        rule.begin_evaluation()
        self._losses: list[torch.Tensor] = []
        self._samples: list[torch.Tensor] = []
        self._targets: list[torch.Tensor] = []
        self._chunks: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, loss: torch.Tensor | None, inputs: Any, rows: int) -> None:
        """Add a batch.

        Raises:
            ValueError: perplexity is requested, and the labels are not tokens.
        """
        if loss is None:
            return
        targets = self._rule.count_inputs(inputs) if rows and self._rule.counts else None
        by_targets = self._rule.weighs_targets(self._takes_count) if targets is not None else False
        if self._args.eval_perplexity and rows:
            _check_tokens(inputs)
            if by_targets is False:
                raise ValueError(_NO_MEAN_OVER_TOKENS)
        device = self._strategy.device
        samples = torch.full((), rows, device=device)
        own = to_device(loss.detach(), device)
        self._losses.append(own if own.dtype is torch.float64 else own.float())
        self._samples.append(samples)
        self._targets.append(samples if targets is None else targets)
        if targets is not None:
            self._by_targets = {by_targets}  # the first batches may say nothing
        if len(self._losses) == _CHUNK:
            self._close_chunk()

    def metrics(self, prefix: str) -> dict[str, float]:
        """Return `<prefix>_loss`, and `<prefix>_perplexity` if requested; nothing without a loss.

        Collective: every rank gets the mean over all ranks.
        """
        mean = self._mean()
        if mean is None:
            return {}
        found = {f"{prefix}_loss": mean}
        if self._args.eval_perplexity:
            found[f"{prefix}_perplexity"] = perplexity(mean)
        return found

    def _mean(self) -> float | None:
        self._close_chunk()
        values, samples, targets = torch.zeros(0), torch.zeros(0), torch.zeros(0)
        if self._chunks:
            parts = zip(*self._chunks, strict=True)
            values, samples, targets = (torch.cat(part).cpu() for part in parts)  # sync: once an evaluation
        parts = [*self._sums(values, samples), *self._sums(values, targets)]
        gathered = self._strategy.gather_objects((parts, len(values), self._by_targets, self._rule.evaluated))
        self._rule.evaluated = _only({seen for *_, seen in gathered})
        sums = [exact_sum(chain(*numbers)) for numbers in zip(*(part for part, *_ in gathered), strict=True)]
        by_samples, over_targets = (total / weight if weight else math.nan for total, weight in (sums[:2], sums[2:]))
        answers = set[bool | None]().union(*(answers for _, _, answers, _ in gathered))
        by_targets = _only(answers) if answers else False
        mean = over_targets if by_targets else by_samples
        if not sums[3 if by_targets else 1]:  # no counting batch, or no loss that is a number
            return math.nan if sum(batches for _, batches, *_ in gathered) else None
        if by_targets is None and math.isfinite(mean) and not math.isclose(mean, over_targets, rel_tol=1e-6):
            raise ValueError(_WEIGHTS_UNKNOWN.format(mean, over_targets))
        return mean

    def _sums(self, losses: torch.Tensor, weights: torch.Tensor) -> tuple[list[float], list[float]]:
        keep, weights = weights > 0, weights.double()
        if self._args.logging_nan_inf_filter:
            keep &= torch.isfinite(losses)
        return (losses.double()[keep] * weights[keep]).tolist(), weights[keep].tolist()

    def _close_chunk(self) -> None:
        if self._losses:
            self._chunks.append((torch.stack(self._losses), torch.stack(self._samples), torch.stack(self._targets)))
            self._losses, self._samples, self._targets = [], [], []


def exact_sum(numbers: Iterable[float]) -> float:
    """Return the rounded sum of numbers, the same in any order."""
    numbers = list(numbers)
    return math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)


def _only(answers: set[bool | None]) -> bool | None:
    """Return what all know who know it; None if nobody does, or if they differ."""
    known = answers - {None}
    return known.pop() if len(known) == 1 else None


def perplexity(mean_loss: float) -> float:
    """Return `exp(mean_loss)`, infinite on overflow."""
    try:
        return math.exp(mean_loss)
    except OverflowError:
        return math.inf


def _check_tokens(inputs: Any) -> None:
    named = inputs if isinstance(inputs, Mapping) else {}
    given = [named[name] for name in ("shift_labels", "labels") if isinstance(named.get(name), torch.Tensor)]
    if any(labels.dim() > 1 and not labels.is_floating_point() for labels in given):
        return
    kinds = [f"{tuple(labels.shape)} of {labels.dtype}" for labels in given] or ["none"]
    raise ValueError(
        "eval_perplexity=True needs a loss over tokens: whole-number labels of shape (samples, length), not "
        f"{', '.join(kinds)}; set eval_perplexity=False"
    )


@runtime_checkable
class StreamingMetric(Protocol):
    """A metric that is updated batch by batch."""

    def update(self, preds: Any, target: Any, /) -> Any:
        """Update with the predictions and labels of a batch, on the device; it need not keep them."""
        ...

    def compute(self) -> Any:
        """Return the value over all batches since `reset`: a number, a tensor, or a mapping of names to these."""
        ...

    def reset(self) -> Any:
        """Reset the metric: drop all batches."""
        ...


def is_streaming(metrics: Any) -> bool:
    """Whether `compute_metrics` is a streaming metric or a mapping of names to some, not a function.

    A callable that takes `compute_result` is a function that is called with every batch.
    """
    if isinstance(metrics, StreamingMetric):
        kind: Any = type(metrics)  # an object of a compiled class has no signature
        return not callable(metrics) or not names_argument(kind.__call__, "compute_result")
    return isinstance(metrics, Mapping)


def check_streaming(metrics: Any) -> None:
    """Raise if a value in a mapping of metrics is not a metric."""
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
    """The metrics of one evaluation, reset from earlier ones.

    In several processes, a metric of torchmetrics is updated with each process's own samples and combines its state in
    `compute`. Any other metric is updated in each process with the samples of all, in the order of the data. That is
    right for any state of the metric.

    Raises:
        ValueError: some metrics of a collection combine their state and others do not.
    """

    def __init__(self, metrics: Any, strategy: Collectives) -> None:
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
        """Update the metrics with a batch; do nothing without predictions or labels."""
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
        """Return the values by name, as numbers and lists; empty if no batch had predictions and labels.

        The value of a single metric is named after its class, values of a mapping by its names.

        Raises:
            ValueError: some ranks had no sample, and a metric that combines its state would wait for ever.
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
                values |= {f"{name}_{key}" if name else str(key): to_plain(item) for key, item in value.items()}
            else:
                values[name or type(metric).__name__] = to_plain(value)
        return values


def combines_itself(metric: Any) -> bool:
    """Whether a metric combines its state over all processes in `compute`, as those of torchmetrics do.

    Raises:
        ValueError: the metric is a collection in which some do and some do not.
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
    """Convert bfloat16 to float32, as for kept predictions."""
    return map_objects(lambda tensor: tensor.float() if tensor.dtype == torch.bfloat16 else tensor, tree)
