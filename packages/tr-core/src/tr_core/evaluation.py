"""Evaluate: predict batch by batch, gather, and compute metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tr_core.batches import batches_of
from tr_core.model_io import batch_size_of, to_device
from tr_core.order import MicroBatch
from tr_core.outputs import Collected, gather_rows, map_tensors
from tr_core.results import EvalLoopOutput, EvalPrediction

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


class EvaluationLoop:
    """One pass over evaluation data.

    Args:
        trainer: whose `prediction_step`, metrics and arguments are used.
        prediction_loss_only: keep no predictions.
        ignore_keys: outputs of the model that are left out.
        prefix: what the metrics' names begin with.
    """

    def __init__(
        self, trainer: Trainer, prediction_loss_only: bool, ignore_keys: list[str] | None, prefix: str
    ) -> None:
        self._trainer, self._strategy, self._args = trainer, trainer.strategy, trainer.args
        self._loss_only, self._ignore_keys, self._prefix = prediction_loss_only, ignore_keys, prefix
        wanted = set(self._args.include_for_metrics)
        self._by_batch = trainer.compute_metrics if self._args.batch_eval_metrics else None
        self._wants_inputs, self._wants_losses = "inputs" in wanted, "loss" in wanted
        self._predictions, self._labels = Collected(), Collected()
        self._inputs, self._losses = Collected(), Collected()
        self._loss_parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._batch_metrics: dict[str, Any] = {}
        self._num_samples = 0

    def run(self, dataloader: Any) -> EvalLoopOutput:
        """Go through the data and return predictions, labels, metrics and the number of samples."""
        trainer = self._trainer
        model = trainer.model_wrapped
        source = batches_of(dataloader, self._args.eval_batch_size, self._strategy.world_size)
        was_training = model.training
        model.eval()
        try:
            for number, (batch, is_last) in enumerate(_mark_last(source.iterate(0, 0)), start=1):
                self._one_batch(model, batch, number, is_last)
                trainer.fire("on_prediction_step")
        finally:
            model.train(was_training)
        return self._finish()

    def _one_batch(self, model: torch.nn.Module, batch: MicroBatch, number: int, is_last: bool) -> None:
        trainer = self._trainer
        inputs = to_device(batch.inputs, self._strategy.device)
        rows = batch_size_of(inputs) or 0
        weight = self._weight(inputs, rows if batch.weight else 0)
        loss, logits, labels = trainer.prediction_step(model, inputs, self._loss_only, ignore_keys=self._ignore_keys)
        self._num_samples += batch.total if batch.total is not None else rows * self._strategy.world_size
        if loss is not None:
            self._loss_parts.append((loss.detach().float(), weight))
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        every = self._args.eval_accumulation_steps
        flush = every is not None and number % every == 0
        kept = {
            "predictions": self._gather(logits, batch.total),
            "label_ids": self._gather(labels, batch.total),
            "inputs": self._gather(self._main_input(inputs), batch.total) if self._wants_inputs else None,
            "losses": self._repeat(loss, rows, batch.total) if self._wants_losses else None,
        }
        if self._by_batch is not None:
            if kept["predictions"] is not None and kept["label_ids"] is not None:
                self._batch_metrics = self._by_batch(EvalPrediction(**kept), compute_result=is_last)
            return
        stores = (self._predictions, self._labels, self._inputs, self._losses)
        for store, tree in zip(stores, kept.values(), strict=True):
            if tree is not None:
                store.add(tree, flush)

    def _finish(self) -> EvalLoopOutput:
        joined = self._args.eval_do_concat_batches
        predictions, labels = self._predictions.arrays(joined), self._labels.arrays(joined)
        metrics: dict[str, Any] = {}
        compute = self._trainer.compute_metrics
        if self._by_batch is not None:
            metrics = dict(self._batch_metrics or {})
        elif compute is not None and predictions is not None and labels is not None:
            inputs, losses = self._inputs.arrays(joined), self._losses.arrays(joined)
            metrics = dict(compute(EvalPrediction(predictions, labels, inputs, losses)))
        metrics = plain_numbers(metrics)
        if (loss := self._mean_loss()) is not None:
            metrics[f"{self._prefix}_loss"] = loss
        return EvalLoopOutput(predictions, labels, with_prefix(metrics, self._prefix), self._num_samples)

    def _weight(self, inputs: Any, rows: int) -> torch.Tensor:
        """Return how much a batch's mean loss counts: its targets where the loss is one of targets, else its rows."""
        targets = self._trainer.loss_rule.count_inputs(inputs) if rows and self._trainer.loss_rule.counts else None
        return torch.full((), rows, device=self._strategy.device) if targets is None else targets

    def _mean_loss(self) -> float | None:
        """Return the mean over samples, or targets, of all ranks: independent of the batch size."""
        values, weights = torch.zeros(0), torch.zeros(0)
        if self._loss_parts:
            values = torch.stack([loss for loss, _ in self._loss_parts]).cpu()  # sync: once an evaluation
            weights = torch.stack([weight for _, weight in self._loss_parts]).cpu().double()
        keep = weights > 0
        if self._args.logging_nan_inf_filter:
            keep &= torch.isfinite(values)
        total = float((values.double()[keep] * weights[keep]).sum())
        sums = self._strategy.gather_objects((total, float(weights[keep].sum()), len(values)))
        samples, batches = sum(weight for _, weight, _ in sums), sum(number for *_, number in sums)
        if not samples:  # nothing that counts, or no loss that is a number
            return math.nan if batches else None
        return sum(part for part, *_ in sums) / samples

    def _gather(self, tree: Any, count: int | None) -> Any:
        if tree is None:
            return None
        return map_tensors(lambda tensor: gather_rows(tensor, self._strategy, count), tree)

    def _repeat(self, loss: torch.Tensor | None, rows: int, count: int | None) -> Any:
        return None if loss is None else self._gather(loss.detach().reshape(1).repeat(rows), count)

    def _main_input(self, inputs: Any) -> Any:
        name = getattr(self._trainer.model, "main_input_name", "input_ids")
        return inputs.get(name) if hasattr(inputs, "get") else None


def prediction_step(
    trainer: Trainer,
    model: torch.nn.Module,
    inputs: Any,
    prediction_loss_only: bool,
    ignore_keys: list[str] | None,
) -> tuple[torch.Tensor | None, Any, Any]:
    """Run the model on one batch without gradients.

    Returns:
        Loss (None without labels), logits (None if only the loss is wanted), labels (None without).
    """
    names = trainer.label_names
    named: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
    has_labels = bool(names) and all(named.get(name) is not None for name in names)
    is_positional = isinstance(inputs, list | tuple) and trainer.loss_function is not None
    gives_loss = has_labels or is_positional or (not names and trainer.can_return_loss)
    ignored = _ignored_outputs(trainer.model) if ignore_keys is None else ignore_keys
    # Taken before the forward: computing the loss may take them out of the inputs.
    labels = map_tensors(torch.Tensor.detach, tuple(named[name] for name in names)) if has_labels else None
    labels = inputs[-1] if is_positional else labels
    loss = None
    with torch.no_grad(), trainer.strategy.autocast():
        if gives_loss:
            loss, outputs = trainer.loss_and_outputs(model, inputs)
            loss = loss.detach().mean()
        else:
            outputs = trainer.call_model(model, inputs)
    if prediction_loss_only:
        return loss, None, None
    if isinstance(labels, tuple) and len(labels) == 1:
        labels = labels[0]
    return loss, _logits(outputs, [*ignored, "loss"], skip_first=gives_loss and trainer.loss_function is None), labels


def _ignored_outputs(model: torch.nn.Module) -> list[str]:
    config = getattr(model, "config", None)
    return [] if config is None else getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])


def _logits(outputs: Any, ignored: list[str], skip_first: bool) -> Any:
    if isinstance(outputs, Mapping):
        kept = tuple(value for key, value in outputs.items() if key not in ignored)
    elif isinstance(outputs, list | tuple):
        kept = tuple(outputs[1:] if skip_first else outputs)
    else:
        fields = vars(outputs) if hasattr(outputs, "__dict__") and not isinstance(outputs, torch.Tensor) else None
        kept = (outputs,) if fields is None else tuple(v for k, v in fields.items() if k not in ignored)
    logits = tuple(map_tensors(torch.Tensor.detach, value) for value in kept)
    return logits[0] if len(logits) == 1 else logits


def with_prefix(metrics: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Put `prefix_` before every name that does not begin with it yet."""
    start = f"{prefix}_"
    return {name if name.startswith(start) else start + name: value for name, value in metrics.items()}


def plain_numbers(value: Any) -> Any:
    """Turn NumPy and torch scalars inside lists, tuples and mappings into Python numbers, to be written as JSON."""
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain_numbers(item) for item in value)
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return value


def _mark_last(items: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    """Yield each item with whether it is the last, holding one back."""
    iterator = iter(items)
    try:
        held = next(iterator)
    except StopIteration:
        return
    for item in iterator:
        yield held, False
        held = item
    yield held, True
