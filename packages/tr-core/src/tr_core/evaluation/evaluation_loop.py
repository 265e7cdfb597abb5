"""Evaluate or predict: run the model batch by batch, gather the outputs, and compute metrics.

One prediction step gives the loss, the outputs and the labels of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tr_core.callbacks.evaluation_weights import evaluation_weights
from tr_core.data.batches import batches_of
from tr_core.data.limits import dev_run_batches
from tr_core.data.sampler import MicroBatch
from tr_core.evaluation.gather import gather_objects, gather_tree, map_objects, map_tensors
from tr_core.evaluation.metrics import EvaluationLoss, StreamingMetrics, is_streaming
from tr_core.evaluation.output_buffer import OutputBuffer
from tr_core.item_count import plain
from tr_core.metric_means import separate_window
from tr_core.model_io import batch_size_of, to_device
from tr_core.results import EvalLoopOutput, EvalPrediction
from tr_core.runtime.run_context import evaluation_context
from tr_log.streams import usable_streams

if TYPE_CHECKING:
    from tr_core.trainer.trainer import Trainer


def prediction_step(
    trainer: Trainer,
    model: torch.nn.Module,
    inputs: Any,
    prediction_loss_only: bool,
    ignore_keys: list[str] | None,
) -> tuple[torch.Tensor | None, Any, Any]:
    """Run the model on one batch without gradients.

    Returns:
        Loss (None without labels), logits (None if only the loss is wanted), labels (None without, and an empty tuple
        where the model computes its loss without any).
    """
    is_positional = isinstance(inputs, list | tuple) and trainer.loss_function is not None
    named_labels = labels_in(trainer, inputs)
    needs_no_labels = not trainer.label_names and _returns_loss(trainer, inputs)
    gives_loss = named_labels is not None or is_positional or needs_no_labels
    ignored = _ignored_outputs(trainer.model) if ignore_keys is None else ignore_keys
    detach = map_objects if trainer.args.eval_use_gather_object else map_tensors
    # Taken before the forward: computing the loss may take them out of the inputs.
    labels = inputs[-1] if is_positional else detach(torch.Tensor.detach, named_labels)
    if needs_no_labels and labels is None:
        labels = ()  # there are none to wait for: metrics are computed of the predictions
    loss = None
    with torch.no_grad(), trainer.loss_context():
        if gives_loss:
            loss, outputs = trainer.loss_and_outputs(model, inputs)
            loss = loss.detach().mean()
        else:
            outputs = trainer.call_model(model, inputs)
    if prediction_loss_only:
        return loss, None, None
    kept = _kept_outputs(outputs, [*ignored, "loss"], skip_first=gives_loss and trainer.loss_function is None)
    logits = detach(_detached, kept)
    return loss, logits[0] if len(logits) == 1 else logits, labels


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return plain(tensor.detach())


def _returns_loss(trainer: Trainer, inputs: Any) -> bool:
    """Whether the model gives a loss without labels: as the batch asks for, else as its forward does by default."""
    asked = inputs.get("return_loss") if isinstance(inputs, Mapping) else None
    return trainer.can_return_loss if asked is None else bool(asked)


def labels_in(trainer: Trainer, inputs: Any) -> Any:
    """Return the labels of a batch that names its parts: a tuple where there are several; None if one is missing."""
    names = trainer.label_names
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


class EvaluationLoop:
    """One pass over evaluation data.

    Args:
        trainer: whose `prediction_step`, metrics and arguments are used.
        prediction_loss_only: keep no predictions; metrics that stream get them all the same.
        ignore_keys: outputs of the model that are left out.
        prefix: what the metrics' names begin with.
        predicts: keep predictions and labels also where metrics are computed batch by batch.
    """

    def __init__(
        self,
        trainer: Trainer,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None,
        prefix: str,
        predicts: bool = False,
    ) -> None:
        self._trainer, self._strategy, self._args = trainer, trainer.strategy, trainer.args
        self._keeps, self._ignore_keys, self._prefix = not prediction_loss_only, ignore_keys, prefix
        compute: Any = trainer.compute_metrics
        self._streaming: StreamingMetrics | None = None
        if is_streaming(compute) and not self._args.prediction_loss_only:
            self._streaming = StreamingMetrics(compute, self._strategy)
        self._by_batch = compute if self._args.batch_eval_metrics and self._keeps else None
        self._compute = compute if self._keeps and not self._by_batch and not is_streaming(compute) else None
        self._keeps_batches = predicts or self._by_batch is None
        self._wanted = set(self._args.include_for_metrics)
        self._stores: dict[str, OutputBuffer] = {}
        self._loss = EvaluationLoss(trainer)
        self._batch_metrics: Any = {}
        self._num_samples = 0

    def run(self, dataloader: Any) -> EvalLoopOutput:
        """Go through the data and return predictions, labels, metrics and the number of samples."""
        trainer = self._trainer
        source = batches_of(dataloader, self._args.eval_batch_size, self._strategy.world_size)
        self._stores = {
            name: OutputBuffer(source.num_samples, concatenate=self._args.eval_do_concat_batches)
            for name in ("predictions", "label_ids", "inputs", "losses")
        }
        with in_evaluation_context(trainer), evaluation_context(trainer), separate_window(trainer) as window:
            model = trainer.model_wrapped
            batches = dev_run_batches(source.iterate(0, 0), self._args)
            for number, (batch, is_last) in enumerate(_mark_last(batches), start=1):
                self._one_batch(model, batch, number, is_last)
                trainer.fire("on_prediction_step")
            return self._finish(window.means())

    def _one_batch(self, model: torch.nn.Module, batch: MicroBatch, number: int, is_last: bool) -> None:
        trainer = self._trainer
        inputs = to_device(batch.inputs, self._strategy.device)
        rows = batch_size_of(inputs) or 0
        loss_only = not self._keeps and self._streaming is None
        trainer.scope.weight = batch.weight
        loss, logits, labels = trainer.prediction_step(model, inputs, loss_only, ignore_keys=self._ignore_keys)
        self._num_samples += batch.total if batch.total is not None else rows * self._strategy.world_size
        self._loss.add(loss, inputs, rows if batch.weight else 0)
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        if self._streaming is not None:
            counts = batch.weight > 0
            self._streaming.update(logits, labels, counts, lambda tree: self._gather(tree, batch))
        if not self._keeps:
            return
        kept = {
            "predictions": self._gather(logits, batch),
            "label_ids": self._gather(labels, batch),
            "inputs": self._gather(self._main_input(inputs), batch) if "inputs" in self._wanted else None,
            "losses": self._gather(_repeat(loss, rows), batch) if "loss" in self._wanted else None,
        }
        if self._by_batch is not None and kept["predictions"] is not None and kept["label_ids"] is not None:
            self._batch_metrics = self._by_batch(EvalPrediction(**kept), compute_result=is_last)
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
            metrics = _checked(self._compute(EvalPrediction(**kept)))
        metrics = logged | plain_numbers(metrics) | self._loss.metrics(self._prefix)
        named = with_prefix(metrics, self._prefix)
        return EvalLoopOutput(kept["predictions"], kept["label_ids"], named, self._num_samples)

    def _gather(self, tree: Any, batch: MicroBatch) -> Any:
        if self._args.eval_use_gather_object:
            return gather_objects(tree, self._strategy, batch.total, batch.weight > 0)
        return gather_tree(tree, self._strategy, batch.total)

    def _main_input(self, inputs: Any) -> Any:
        name = getattr(self._trainer.model, "main_input_name", "input_ids")
        return inputs.get(name) if hasattr(inputs, "get") else None


@contextmanager
def in_evaluation_context(trainer: Trainer) -> Iterator[None]:
    """Surround an evaluation and its events by `Trainer.evaluation_context`; already inside it, do nothing."""
    if trainer.is_in_evaluation:
        yield
        return
    trainer.prepare()
    trainer.is_in_evaluation = True
    try:
        with usable_streams(), trainer.evaluation_context():
            yield
    finally:
        trainer.is_in_evaluation = False


@contextmanager
def evaluation_state(trainer: Trainer) -> Iterator[None]:
    """Have the model as it is to be evaluated: in evaluation mode, and with the weights for that."""
    with evaluation_weights(trainer), _evaluation_mode(trainer.model_wrapped):
        yield


@contextmanager
def _evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode and each of its modules back into the mode it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(modes[0][1])  # a model may do more than set the flags
        for module, mode in modes:
            module.training = mode


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


def _checked(metrics: Any) -> dict[str, Any]:
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"compute_metrics returned {metrics!r}; it must return a dict of names and values, which may be empty"
        )
    return dict(metrics)


def _repeat(loss: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    return None if loss is None else loss.detach().reshape(1).repeat(rows)


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
