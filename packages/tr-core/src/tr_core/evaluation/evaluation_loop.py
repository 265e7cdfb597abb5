"""Evaluate or predict: run the model batch by batch, gather the outputs, and compute metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tr_args import TrainingArguments
from tr_core.data.batches import batches_of
from tr_core.data.sampler import MicroBatch
from tr_core.data.short_runs import dev_run_batches
from tr_core.evaluation.gather import check_same_on_ranks, gather_objects, gather_tree, map_objects, outline
from tr_core.evaluation.metrics import EvaluationLoss, StreamingMetrics, is_streaming
from tr_core.evaluation.output_buffer import OutputBuffer
from tr_core.metric_means import MetricWindow
from tr_core.model_io import batch_size_of, to_device
from tr_core.protocols import Strategy
from tr_core.results import EvalLoopOutput, EvalPrediction
from tr_core.step_scope import StepScope
from tr_core.trainer_methods import TrainerMethods
from tr_log.phases import PhaseClock, active_clock

# Calls a function with every tensor of a tree.
Detach = Callable[[Callable[[torch.Tensor], Any], Any], Any]


def read_labels(
    inputs: Any, label_names: list[str], *, has_loss_function: bool, returns_loss: bool, detach: Detach
) -> tuple[Any, bool]:
    """Return the labels of a batch, and whether the batch has a loss.

    Call it before the forward, because computing the loss may remove labels from the inputs. The labels are None
    without labels, and an empty tuple if the model computes its loss without any. A loss function uses the last of a
    tuple as labels.
    """
    if isinstance(inputs, list | tuple) and has_loss_function:
        return inputs[-1], True
    labels = detach(torch.Tensor.detach, labels_in(inputs, label_names))
    asked = inputs.get("return_loss") if isinstance(inputs, Mapping) else None
    needs_no_labels = not label_names and (returns_loss if asked is None else bool(asked))
    if needs_no_labels and labels is None:
        labels = ()  # no labels will come: metrics are computed from the predictions
    return labels, labels is not None


def kept_logits(
    outputs: Any, model: torch.nn.Module, ignore_keys: list[str] | None, *, skip_first: bool, detach: Detach
) -> Any:
    """Return the outputs of a model to keep as predictions: without the loss and ignored outputs."""
    ignored = _ignored_outputs(model) if ignore_keys is None else ignore_keys
    logits = detach(torch.Tensor.detach, _kept_outputs(outputs, [*ignored, "loss"], skip_first=skip_first))
    return logits[0] if len(logits) == 1 else logits


def labels_in(inputs: Any, names: list[str]) -> Any:
    """Return the labels of a batch with named parts: a tuple if there are several; None if one is missing."""
    if not names or not isinstance(inputs, Mapping) or any(inputs.get(name) is None for name in names):
        return None
    labels = tuple(inputs[name] for name in names)
    return labels[0] if len(labels) == 1 else labels


def _ignored_outputs(model: torch.nn.Module) -> list[str]:
    config = getattr(model, "config", None)
    return [] if config is None else getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])


def _kept_outputs(outputs: Any, ignored: list[str], skip_first: bool) -> tuple[Any, ...]:
    if isinstance(outputs, Mapping):
        return tuple(value for key, value in outputs.items() if key not in ignored)
    if isinstance(outputs, list | tuple):
        return tuple(outputs[1:] if skip_first else outputs)
    if hasattr(outputs, "__dict__") and not isinstance(outputs, torch.Tensor):
        return tuple(value for key, value in vars(outputs).items() if key not in ignored)
    return (outputs,)


@dataclass(frozen=True)
class EvaluationOptions:
    """Options of one evaluation.

    Attributes:
        loss_only: keep no predictions; streaming metrics get them anyway.
        predicts: keep predictions and labels even if metrics are computed batch by batch.
        main_input: name of the input that metrics receive, if they take inputs.
    """

    loss_only: bool
    ignore_keys: list[str] | None
    prefix: str
    predicts: bool = False
    main_input: str = "input_ids"


class EvaluationLoop:
    """Runs the model over evaluation data once."""

    def __init__(
        self,
        methods: TrainerMethods,
        options: EvaluationOptions,
        args: TrainingArguments,
        strategy: Strategy,
        scope: StepScope,
        loss: EvaluationLoss,
        *,
        compute_metrics: Any,
    ) -> None:
        self._methods, self._options, self._args, self._strategy = methods, options, args, strategy
        self._scope, self._loss, self._keeps = scope, loss, not options.loss_only
        compute = compute_metrics
        self._streaming: StreamingMetrics | None = None
        if is_streaming(compute) and not args.prediction_loss_only:
            if args.elastic is not None:
                raise ValueError(
                    "elastic computes metrics over all predictions, whose order does not depend on the processes; give "
                    "a compute_metrics function in place of a metric that is updated batch by batch"
                )
            self._streaming = StreamingMetrics(compute, strategy.data)
        self._by_batch = compute if args.batch_eval_metrics and self._keeps else None
        self._compute = compute if self._keeps and not self._by_batch and not is_streaming(compute) else None
        self._keeps_batches = options.predicts or self._by_batch is None
        self._wanted = set(args.include_for_metrics)
        self._stores: dict[str, OutputBuffer] = {}
        self._batch_metrics: Any = {}
        self._num_samples, self._counts_own = 0, False  # of all ranks, or each its own

    def run(self, dataloader: Any, model: torch.nn.Module, window: MetricWindow) -> EvalLoopOutput:
        """Evaluate the data and return predictions, labels, metrics and the number of samples."""
        elastic = self._args.elastic is not None
        source = batches_of(dataloader, self._args.eval_batch_size, self._strategy.data, elastic=elastic)
        self._stores = {
            name: OutputBuffer(source.num_samples, concatenate=self._args.eval_do_concat_batches)
            for name in ("predictions", "label_ids", "inputs", "losses")
        }
        batches = dev_run_batches(source.iterate(0, 0), self._args)
        clock = active_clock() or PhaseClock()
        for number, (batch, is_last) in enumerate(_mark_last(batches), start=1):
            self._one_batch(model, batch, number, is_last)
            clock.batches += 1
            self._methods.fire("on_prediction_step")
        return self._finish(window.means())

    def _one_batch(self, model: torch.nn.Module, batch: MicroBatch, number: int, is_last: bool) -> None:
        methods = self._methods
        inputs = to_device(batch.inputs, self._strategy.device)
        rows = batch_size_of(inputs) or 0
        loss_only = not self._keeps and self._streaming is None
        self._scope.weight, self._scope.total, self._scope.inputs = batch.weight, batch.total, batch.inputs
        loss, logits, labels = methods.prediction_step(model, inputs, loss_only, ignore_keys=self._options.ignore_keys)
        self._scope.inputs = None
        self._counts_own = batch.total is None
        self._num_samples += (rows if batch.weight else 0) if batch.total is None else batch.total
        self._loss.add(loss, inputs, rows if batch.weight else 0)
        if logits is not None and methods.preprocess_logits_for_metrics is not None:
            logits = methods.preprocess_logits_for_metrics(logits, labels)
        given = {
            "predictions": logits,
            "label_ids": labels,
            "inputs": self._main_input(inputs) if "inputs" in self._wanted else None,
            "losses": _repeat(loss, rows) if "loss" in self._wanted else None,
        }
        if not loss_only:
            self._check_ranks(given, number)
        if self._streaming is not None:
            counts = batch.weight > 0
            self._streaming.update(logits, labels, counts, lambda tree: self._gather(tree, batch))
        if not self._keeps:
            return
        kept = {name: self._gather(tree, batch) for name, tree in given.items()}
        if self._by_batch is not None and kept["predictions"] is not None and kept["label_ids"] is not None:
            self._batch_metrics = _metrics_of(self._by_batch, kept, compute_result=is_last)
        if not self._keeps_batches:
            return
        every = self._args.eval_accumulation_steps
        for name, store in self._stores.items():
            store.add(kept[name], flush=every is not None and number % every == 0)

    def _finish(self, logged: dict[str, float]) -> EvalLoopOutput:
        kept = {name: store.arrays() for name, store in self._stores.items()}
        has_both = kept["predictions"] is not None and kept["label_ids"] is not None
        metrics: dict[str, Any] = {}
        if self._streaming is not None:
            metrics = self._streaming.compute()
        elif self._by_batch is not None:
            metrics = _checked(self._batch_metrics)
        elif self._compute is not None and has_both:
            metrics = _checked(_metrics_of(self._compute, kept))
        metrics = logged | plain_numbers(metrics) | self._loss.metrics(self._options.prefix)
        named = with_prefix(metrics, self._options.prefix)
        samples = sum(self._strategy.data.gather_objects(self._num_samples)) if self._counts_own else self._num_samples
        return EvalLoopOutput(kept["predictions"], kept["label_ids"], named, samples)

    def _gather(self, tree: Any, batch: MicroBatch) -> Any:
        if batch.total is None and not batch.weight:  # a batch of another rank, computed only to take part
            tree = map_objects(lambda tensor: torch.atleast_1d(tensor)[:0], tree)
        if self._args.eval_use_gather_object:
            return gather_objects(tree, self._strategy.data, batch.total, batch.weight > 0)
        return gather_tree(tree, self._strategy.data, batch.total)

    def _check_ranks(self, given: dict[str, Any], number: int) -> None:
        """Refuse on all ranks a batch of which they would gather different things."""
        mine = outline(given, objects=self._args.eval_use_gather_object)
        check_same_on_ranks(mine, self._strategy.data, f"batch {number} of this evaluation")

    def _main_input(self, inputs: Any) -> Any:
        return inputs.get(self._options.main_input) if hasattr(inputs, "get") else None


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode in the block, and restore the mode of each module afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # a model's `train` may do more than set the flags
        for module, mode in modes:
            module.training = mode


def with_prefix(metrics: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Add `prefix_` to every name that lacks it."""
    start = f"{prefix}_"
    return {name if name.startswith(start) else start + name: value for name, value in metrics.items()}


def plain_numbers(value: Any) -> Any:
    """Convert NumPy and torch scalars inside lists, tuples and mappings to Python numbers, for JSON."""
    if isinstance(value, dict):
        return {key: plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain_numbers(item) for item in value)
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return value.item()
    return value


def _metrics_of(compute: Any, kept: dict[str, Any], **options: Any) -> Any:
    try:
        return compute(EvalPrediction(**kept), **options)
    except Exception as error:
        error.add_note(f"raised by compute_metrics, whose argument has {', '.join(kept)}")
        raise


def _checked(metrics: Any) -> dict[str, Any]:
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"compute_metrics returned {metrics!r}; it must return a dict of names and values, which may be empty"
        )
    return dict(metrics)


def _repeat(loss: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    return None if loss is None else loss.detach().reshape(1).repeat(rows)


def _mark_last(items: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, bool]]:
    """Yield each item with whether it is the last; delays each item by one."""
    iterator = iter(items)
    try:
        held = next(iterator)
    except StopIteration:
        return
    for item in iterator:
        yield held, False
        held = item
    yield held, True
