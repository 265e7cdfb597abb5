"""Try the model: forward and backward of two samples, and an evaluation of two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tr_core.changes import assigned
from tr_core.data.sampler import MicroBatch, has_length
from tr_core.evaluation.best_metric import adds_to_results, metric_name, watched_metric
from tr_core.evaluation.metrics import is_streaming
from tr_core.model_io import batch_size_of, local_shard, rows_of
from tr_core.preflight.context import SAMPLES, CheckContext, logger
from tr_core.preflight.data_checks import check_samples, first_batch
from tr_core.random_state import set_seed
from tr_core.runtime.run_context import align_special_tokens
from tr_core.signatures import takes_argument
from tr_core.validation import check_quantized


def check_trainable(subject: CheckContext) -> None:
    """Find a model whose parameters are all frozen, or quantized without an adapter."""
    model = subject.trainer.model
    if not subject.trains:
        return
    with subject.saying("T501"):
        check_quantized(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        subject.say(
            "T501",
            f"none of the {len(list(model.parameters()))} parameters of {type(model).__name__} is trainable; set "
            "requires_grad where training is to change something",
        )


def micro_batches(subject: CheckContext, pieces: Sequence[Any], seed: int = 1) -> float:
    """Run the micro-batches of one step as the loop does, without its update, and return the loss of the step."""
    trainer = subject.trainer
    model, strategy, rule, scope = trainer.model_wrapped, trainer.strategy, trainer.loss_rule, trainer.scope
    set_seed(seed)
    model.zero_grad(set_to_none=True)
    scope.size, scope.weight = len(pieces), 1.0
    num_items = rule.count([MicroBatch(piece, 1.0, 0, None) for piece in pieces]) if rule.counts else None
    total = torch.zeros((), device=strategy.device)
    with assigned(trainer, is_in_train=True), scope.separate_window(strategy.data):
        for number, piece in enumerate(pieces, start=1):
            scope.inputs = piece
            with strategy.accumulate(model, sync=number == len(pieces)):
                total = total + trainer.step_function(model, piece, num_items)
    scope.inputs = None
    return total.item()  # sync: a preflight reads what it compares


def check_forward_backward(subject: CheckContext) -> None:
    """Compute loss and gradients of two samples in training mode, as in a step of the run."""
    trainer, figures, inputs = subject.trainer, subject.figures, subject.inputs
    if inputs is None or not figures["trainable_parameters"]:
        return
    logger.info("check: one forward and backward of two samples")
    align_special_tokens(trainer.model, trainer.processing_class)
    trainer.model_wrapped.train()
    trainer.callback_handler.wants_outputs = takes_argument(trainer.compute_loss, "return_outputs")
    try:
        with trainer.training_context():
            loss = micro_batches(subject, [inputs])
    except Exception as error:
        subject.say_why(error, trainer.train_dataset, "T502", "forward and backward of the first samples fail")
        return
    if loss - loss != 0:
        bad = not_finite(trainer.model.named_parameters())
        why = "weights are finite: look for bad numbers in the data, a division by zero, or a mean over no target"
        if bad:
            why = f"the weights {bad[0]!r} are not finite: load them again"
        subject.say("T506", f"the loss of the first {SAMPLES} samples is {loss}; {why}")
        return
    figures |= {"loss": loss, "trial_samples": batch_size_of(inputs)}
    _check_gradients(subject)
    outputs, labels = trainer.scope.outputs, inputs.get("labels") if isinstance(inputs, Mapping) else None
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor) and logits.shape[:-1] == labels.shape:
        check_samples(subject, classes=logits.shape[-1] if logits.shape[-1] > 1 else 0)


def not_finite(named: Iterable[tuple[str, torch.Tensor | None]]) -> list[str]:
    """Return the names of tensors of which this rank holds a number that is not finite. Sync: in a preflight alone."""
    return [name for name, t in named if t is not None and not local_shard(t.detach()).isfinite().all()]


def _check_gradients(subject: CheckContext) -> None:
    named = [(name, p.grad) for name, p in subject.trainer.model.named_parameters() if p.requires_grad]
    if without := [name for name, gradient in named if gradient is None]:
        shown = ", ".join(without[:3]) + (", ..." if len(without) > 3 else "")
        subject.say(
            "T508",
            f"{len(without)} of {len(named)} trainable parameters took no part in the loss of two samples ({shown}); "
            "freeze them, or use them; several processes need ddp_find_unused_parameters=True for them",
        )
    bad = not_finite(named)
    if bad and not subject.args.fp16:  # scaled losses overflow at first, and the scale adapts
        subject.say(
            "T506",
            f"the loss is finite, but the gradient of {bad[0]!r} and {len(bad) - 1} other parameters is not; look for "
            "a square root or a norm of 0",
        )


def check_loss_division(subject: CheckContext) -> None:
    """Compare the loss of 1 micro-batch of N samples with that of N micro-batches of 1: equal but for rounding.

    The model is in evaluation mode, so that neither dropout nor batch statistics make a difference. The samples are
    rows of one batch, so that the collator makes no difference either. A loss that depends on random numbers cannot be
    compared.
    """
    number = batch_size_of(subject.inputs) or 0
    if "loss" not in subject.figures or number < 2:
        return
    logger.info("check: testing what the loss is divided by")
    trainer, args = subject.trainer, subject.args
    trainer.model_wrapped.eval()
    whole, again = (micro_batches(subject, [subject.inputs], seed) for seed in (1, 2))
    divided = micro_batches(subject, [rows_of(subject.inputs, row, row + 1) for row in range(number)])
    tolerance = _tolerance(subject)
    if _difference(whole, again) > tolerance:
        subject.say("T012", "the loss depends on random numbers: dividing it into micro-batches was not compared")
        return
    losses = f"{whole:.6g} for 1 micro-batch of {number} samples, {divided:.6g} for {number} of 1"
    if _difference(whole, divided) <= tolerance:
        return
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
            f"{_difference(whole, divided):.2g}); the cause is a mean over targets of which samples have unequal "
            "numbers, or a loss that compares the samples of a batch. Take num_items_in_batch in the loss and divide a "
            "sum by it, or set gradient_accumulation_steps=1",
            "gradient_accumulation_steps",
        )


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


def check_evaluation(subject: CheckContext) -> None:
    """Run `compute_metrics` on two evaluation samples, and check for the metric of the best model."""
    found: list[dict[str, Any]] = []
    for prefix, dataset in subject.evaluation_sets().items():
        logger.info("check: evaluating two samples (%s)", prefix)
        found.append(_evaluate(subject, prefix, dataset))
    results = {name: value for metrics in found for name, value in metrics.items()}
    subject.figures["metrics"] = sorted(results) or None
    if found and all(found):
        _check_watched(subject, results)


def _evaluate(subject: CheckContext, prefix: str, dataset: Any) -> dict[str, Any]:
    trainer, compute = subject.trainer, subject.trainer.compute_metrics
    if has_length(dataset) and len(dataset) == 0:
        subject.say("T407", f"the evaluation data ({prefix}) is empty; add data, or set eval_strategy='no'")
        return {}
    options = {"ignore_keys": None, "metric_key_prefix": prefix}
    options["prediction_loss_only"] = True if compute is None or is_streaming(compute) else None
    for number in (SAMPLES, _MORE_SAMPLES):
        if (batch := first_batch(subject, dataset, "evaluation", number)) is None:
            return {}
        try:
            return trainer.evaluation_loop([batch], description="Preflight", **options).metrics
        except Exception as error:
            if number == _MORE_SAMPLES:
                subject.say_why(error, dataset, "T604", f"evaluating {number} samples ({prefix}) fails")
    return {}


def _check_watched(subject: CheckContext, results: dict[str, Any]) -> None:
    args, trainer = subject.args, subject.trainer
    watched = args.metric_for_best_model
    if watched is None or args.eval_strategy == "no":
        return
    key = metric_name(watched)
    of_speed = ("runtime", "samples_per_second", "steps_per_second")  # every evaluation reports them too
    measured = [f"{prefix}_{name}" for prefix in subject.evaluation_sets() for name in of_speed]
    # What adds metrics of its own shows them only in a full evaluation.
    if key in results or (key not in measured and not adds_to_results(trainer.overrides, subject.callbacks)):
        with subject.saying("T601", "metric_for_best_model"):
            watched_metric(args, results)
