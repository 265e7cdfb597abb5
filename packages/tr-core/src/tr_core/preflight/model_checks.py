"""Try the model: forward and backward of two samples, and an evaluation of two."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from tr_args.errors import did_you_mean
from tr_core.data.fetch import identity
from tr_core.data.sampler import MicroBatch, has_length
from tr_core.evaluation.best_metric import adds_to_results, metric_name
from tr_core.evaluation.metrics import is_streaming
from tr_core.metric_means import MetricWindow
from tr_core.model_io import batch_size_of
from tr_core.preflight.context import SAMPLES, CheckContext
from tr_core.preflight.data_checks import collate, labels_outside, rows_of
from tr_core.preflight.diagnosis import Failure, diagnose
from tr_core.preflight.origins import passed_through
from tr_core.random_state import set_seed
from tr_core.runtime.run_context import align_special_tokens
from tr_core.signatures import takes_argument
from tr_core.validation import check_quantized


def check_trainable(subject: CheckContext) -> None:
    """Find a model whose parameters are all frozen, or quantized without an adapter."""
    model = subject.trainer.model
    with subject.saying("T513"):
        if subject.trains:
            check_quantized(model)
        if subject.trains and not any(parameter.requires_grad for parameter in model.parameters()):
            subject.say(
                "T501",
                f"none of the {len(list(model.parameters()))} parameters of {type(model).__name__} is trainable; set "
                "requires_grad where training is to change something",
            )


@contextmanager
def training_mode(subject: CheckContext, *, with_conditions: bool = True) -> Iterator[None]:
    """Put the Trainer into its mid-training state inside the block: step number, metric window, run-wide settings."""
    trainer = subject.trainer
    trainer.is_in_train, trainer.scope.metrics = True, MetricWindow(trainer.strategy)
    trainer.state.max_steps = subject.steps or 0
    aligned = align_special_tokens(trainer.model, trainer.processing_class) if with_conditions else []
    try:
        with trainer.training_context() if with_conditions else nullcontext():
            yield
    finally:
        for config, name, value in aligned:
            setattr(config, name, value)
        trainer.is_in_train, trainer.scope.metrics = False, None


def micro_batches(subject: CheckContext, pieces: Sequence[Any], seed: int = 1) -> float:
    """Run the micro-batches of one step as the loop does, without its update, and return the loss of the step."""
    trainer, figures = subject.trainer, subject.figures
    model, strategy, rule = trainer.model_wrapped, trainer.strategy, trainer.loss_rule
    set_seed(seed)
    model.zero_grad(set_to_none=True)
    start_s = time.perf_counter()
    trainer.scope.size, trainer.scope.weight = len(pieces), 1.0
    num_items = rule.count([MicroBatch(piece, 1.0, 0, None) for piece in pieces]) if rule.counts else None
    total = torch.zeros((), device=strategy.device)
    for number, piece in enumerate(pieces, start=1):
        with strategy.accumulate(model, sync=number == len(pieces)):
            total = total + trainer.step_function(model, piece, num_items)
    loss = total.item()  # sync: a preflight reads what it compares, when the device has finished
    if len(pieces) == 1:  # the first forward and backward allocate and warm up: the fastest counts
        taken_s = time.perf_counter() - start_s
        figures["forward_backward_s"] = min(figures.get("forward_backward_s", taken_s), taken_s)
    return loss


def check_forward_backward(subject: CheckContext) -> None:
    """Compute loss and gradients of two samples in training mode, as in a step of the run."""
    trainer, figures, inputs = subject.trainer, subject.figures, subject.inputs
    if inputs is None or not any(parameter.requires_grad for parameter in trainer.model.parameters()):
        return
    compiled = ", compiling the model first" if subject.args.torch_compile else ""
    subject.progress(f"one forward and backward of two samples{compiled}")
    trainer.model_wrapped.train()
    trainer.callback_handler.wants_outputs = takes_argument(trainer.compute_loss, "return_outputs")
    device = trainer.strategy.device
    memory: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if hasattr(memory, "reset_peak_memory_stats"):
        memory.reset_peak_memory_stats(device)
    try:
        with training_mode(subject):
            loss = micro_batches(subject, [inputs])
    except Exception as error:
        failure = Failure(error, trainer)
        part = "backward" if passed_through(error, "backward") else "forward"
        fails = "T502", f"the {part} pass of a batch with {failure.columns} fails"
        subject.say_error(*(diagnose(failure) or fails), error)
        return
    if loss - loss != 0:
        subject.say("T506", f"the loss of the first {SAMPLES} samples is {loss}; {_culprit(subject)}")
        return
    figures |= {"loss": loss, "trial_samples": batch_size_of(inputs)}
    if hasattr(memory, "max_memory_allocated"):
        figures["peak_bytes"] = memory.max_memory_allocated(device)
    subject.gives_loss = True
    if subject.classes is None:
        subject.classes = _classes_of(trainer.scope.outputs, inputs)
        if subject.classes is not None:
            labels_outside(subject)
    _check_gradients(subject)


def _culprit(subject: CheckContext) -> str:
    inputs = subject.inputs if isinstance(subject.inputs, Mapping) else {}
    for kind, values in (("weights", dict(subject.trainer.model.named_parameters())), ("input", inputs)):
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and not torch.isfinite(value).all().item():  # sync: once a preflight
                what = "load them again" if kind == "weights" else "clean the data"
                return f"the {kind} {name!r} hold{'s' * (kind == 'input')} numbers that are not finite: {what}"
    return "weights and inputs are finite: look for a division by zero, a logarithm of 0, or a mean over no target"


def _check_gradients(subject: CheckContext) -> None:
    named = [(name, p) for name, p in subject.trainer.model.named_parameters() if p.requires_grad]
    if without := [name for name, parameter in named if parameter.grad is None]:
        shown = ", ".join(without[:3]) + (", ..." if len(without) > 3 else "")
        subject.say(
            "T508",
            f"{len(without)} of {len(named)} trainable parameters took no part in the loss of two samples ({shown}); "
            "freeze them, or use them; several processes need ddp_find_unused_parameters=True for them",
        )
    bad = [name for name, p in named if p.grad is not None and not torch.isfinite(p.grad).all().item()]  # sync: once
    if bad and not subject.args.fp16:  # scaled losses overflow at first, and the scale adapts
        subject.say(
            "T507",
            f"the loss is finite, but the gradient of {bad[0]!r} and {len(bad) - 1} other parameters is not; look for "
            "a square root or a norm of 0",
        )


def _classes_of(outputs: Any, inputs: Any) -> int | None:
    """Return the width of the logits, if labels are whole numbers, one for each row."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(logits, torch.Tensor) or not isinstance(labels, torch.Tensor):
        return None
    is_whole = not labels.dtype.is_floating_point and labels.dtype != torch.bool
    return logits.shape[-1] if is_whole and logits.shape[:-1] == labels.shape and logits.shape[-1] > 1 else None


def check_loss_division(subject: CheckContext) -> None:
    """Compare the loss of 1 micro-batch of N samples with that of N micro-batches of 1: equal but for rounding.

    The model is in evaluation mode, so that neither dropout nor batch statistics make a difference. The samples are
    rows of one batch, so that the collator makes no difference either. A loss that depends on random numbers cannot be
    compared.
    """
    number = batch_size_of(subject.inputs) or 0 if subject.gives_loss else 0
    if number < 2:
        return
    subject.progress("testing what the loss is divided by")
    trainer, args = subject.trainer, subject.args
    trainer.model_wrapped.eval()
    try:
        singles = [rows_of(subject.inputs, index, index + 1) for index in range(number)]
        with training_mode(subject, with_conditions=False):
            whole, again = (micro_batches(subject, [subject.inputs], seed) for seed in (1, 2))
            divided = micro_batches(subject, singles)
    except Exception as error:
        subject.say_error("T512", "samples of the batch cannot be taken one by one", error)
        return
    tolerance = _tolerance(subject)
    if _difference(whole, again) > tolerance:
        subject.say("T512", "the loss depends on random numbers: dividing it into micro-batches was not compared")
    if _difference(whole, again) > tolerance or _difference(whole, divided) <= tolerance:
        return
    losses = f"{whole:.6g} for 1 micro-batch of {number} samples, {divided:.6g} for {number} of 1"
    cause = "a mean over targets of which samples have unequal numbers, or a loss that compares the samples of a batch"
    if _difference(whole, divided * number) <= tolerance:
        subject.say(
            "T509",
            f"the loss is a sum over the samples, not a mean: {losses}, a ratio of {whole / divided:.4g}; divide it by "
            "the number of samples or targets, or take num_items_in_batch and divide by that",
        )
    elif args.gradient_accumulation_steps > 1 or trainer.strategy.world_size > 1:
        subject.say(
            "T510",
            f"the loss of a step depends on how it is divided: {losses} (relative difference "
            f"{_difference(whole, divided):.2g}); the cause is {cause}. Take num_items_in_batch in the loss and divide "
            "a sum by it, or set gradient_accumulation_steps=1",
            "gradient_accumulation_steps",
        )
    else:
        subject.say("T511", f"the loss depends on the micro-batch: {losses}; the cause is {cause}")


def _difference(first: float, second: float) -> float:
    return abs(first - second) / max(abs(first), abs(second), 1e-12)


def _tolerance(subject: CheckContext) -> float:
    """Return the relative difference that rounding can cause in the precision of the computation."""
    lowest = torch.bfloat16 if subject.args.bf16 else torch.float16 if subject.args.fp16 else torch.float64
    weights = [p.dtype for p in subject.trainer.model.parameters() if p.is_floating_point()]
    # Float32 values are summed over thousands of terms; sixteen half-precision roundings are a coarse bound.
    halves = (torch.bfloat16, torch.float16)
    return max(1e-9, *(torch.finfo(d).eps * (16 if d in halves else 2000) for d in (*weights, lowest)))


_MORE_SAMPLES = 64
"""Number of samples for metrics that cannot be computed from two samples."""
_MEASURED = ("runtime", "samples_per_second", "steps_per_second")
"""Entries that every evaluation reports beside the metrics."""


def check_evaluation(subject: CheckContext) -> None:
    """Run `compute_metrics` on two evaluation samples, and check for the metric of the best model."""
    results: dict[str, Any] = {}
    complete = True
    for prefix, dataset in subject.evaluation_sets().items():
        if has_length(dataset) and len(dataset) == 0:
            subject.say("T407", f"the evaluation data ({prefix}) is empty; add data, or set eval_strategy='no'")
            complete = False
            continue
        subject.progress(f"evaluating two samples ({prefix})")
        found = _evaluate(subject, prefix, dataset)
        complete = complete and bool(found)
        results |= found
    if results:
        subject.figures["metrics"] = sorted(results)
    if complete and results and subject.args.eval_strategy != "no":
        _check_watched(subject, results)


def _evaluate(subject: CheckContext, prefix: str, dataset: Any) -> dict[str, Any]:
    trainer, compute = subject.trainer, subject.trainer.compute_metrics
    loss_only = True if compute is None or is_streaming(compute) else None
    error: Exception | None = None
    for number in (SAMPLES, _MORE_SAMPLES):
        if (batch := collate(subject, dataset, "evaluation", number)) is None:
            return {}
        loader = DataLoader([batch], batch_size=None, collate_fn=identity)  # type: ignore[arg-type]  a list will do
        options = {"prediction_loss_only": loss_only, "ignore_keys": None, "metric_key_prefix": prefix}
        try:
            return trainer.evaluation_loop(loader, description="Preflight", **options).metrics
        except Exception as caught:
            error = caught
    if error is not None:
        inside = ("update", "compute") if is_streaming(compute) else (_function_name(compute),)
        name = getattr(compute, "__name__", type(compute).__name__)
        found = "T602", f"{name} fails on {_MORE_SAMPLES} evaluation samples"
        if not passed_through(error, *inside):
            found = diagnose(Failure(error, trainer)) or ("T604", f"evaluating ({prefix}) fails")
        subject.say_error(*found, error)
    return {}


def _function_name(compute: Any) -> str:
    return compute.__code__.co_name if hasattr(compute, "__code__") else "__call__"


def _check_watched(subject: CheckContext, results: dict[str, Any]) -> None:
    watched, trainer = subject.args.metric_for_best_model, subject.trainer
    if watched is None:
        return
    key, option = metric_name(watched), "metric_for_best_model"
    measured = [f"{prefix}_{name}" for prefix in subject.evaluation_sets() for name in _MEASURED]
    if key in results:
        if not isinstance(results[key], int | float):
            subject.say("T603", f"{option}={watched!r} is {results[key]!r}; it must be a number", option)
    # What adds metrics of its own shows them only in a full evaluation.
    elif key not in measured and not adds_to_results(trainer.overrides, subject.callbacks):
        subject.say(
            "T601",
            f"{option}={watched!r} needs {key!r}, which is not among the results of an evaluation: "
            f"{', '.join(sorted(results))}{did_you_mean(key, results)}",
            option,
        )
