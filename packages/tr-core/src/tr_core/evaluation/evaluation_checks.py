"""Refuse, before anything is trained, evaluations that cannot be made as asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tr_core.evaluation.streaming import check_streaming, is_streaming
from tr_core.losses.targets import takes_argument

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


def check_evaluation(trainer: Trainer) -> None:
    """Raise where `compute_metrics` or the model cannot give what the arguments ask of an evaluation.

    Raises:
        ValueError: the arguments do not fit; the message says what to change.
        TypeError: `compute_metrics` is neither a function nor made of metrics.
    """
    if trainer.compute_metrics is not None:
        _check_metrics(trainer)
    if trainer.args.eval_perplexity and not trainer.loss_rule.counts:
        raise ValueError(
            f"eval_perplexity=True needs a mean over tokens, but the loss of {type(trainer.model).__name__} is one "
            "over each batch, whatever its tokens: its forward, or compute_loss_func, must take num_items_in_batch and "
            "divide the summed loss by it; or set eval_perplexity=False"
        )


def _check_metrics(trainer: Trainer) -> None:
    args, compute = trainer.args, trainer.compute_metrics
    if is_streaming(compute):
        check_streaming(compute)
        if args.batch_eval_metrics:
            raise ValueError(
                "batch_eval_metrics=True calls compute_metrics as a function, but it is a metric with update, which "
                "sees every batch anyway; set batch_eval_metrics=False"
            )
        if args.include_for_metrics:
            raise ValueError(
                f"include_for_metrics={args.include_for_metrics} is for a function that gets an EvalPrediction, but "
                "compute_metrics is a metric with update(preds, target); set include_for_metrics=[]"
            )
    elif not callable(compute):
        raise TypeError(
            f"compute_metrics is a {type(compute).__name__}; it must be a function of an EvalPrediction, an object "
            "with update, compute and reset, or a dict of such objects"
        )
    elif args.batch_eval_metrics and not takes_argument(compute, "compute_result"):
        raise ValueError(
            "batch_eval_metrics=True calls compute_metrics(prediction, compute_result=bool) after every batch, but "
            "compute_metrics takes no compute_result"
        )
