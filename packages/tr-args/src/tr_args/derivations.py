"""Fill in the arguments whose values follow from others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tr_args.launcher_settings import follow_launcher
from tr_args.strategies import IntervalStrategy, SaveStrategy

if TYPE_CHECKING:
    from tr_args.training_arguments import TrainingArguments

METRIC_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""Schedules that follow the watched metric."""


def fill_in(args: TrainingArguments) -> None:
    """Set what is unset and follows from other values. Filling in twice changes nothing."""
    follow_launcher(args)
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_steps is None:
        args.eval_steps = args.logging_steps
    if args.disable_tqdm is None:
        args.disable_tqdm = args.log_level in ("error", "critical")
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"
    if args.metric_for_best_model is None and watches_metric(args):
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith(("loss", "perplexity"))


def watches_metric(args: TrainingArguments) -> bool:
    """Return whether training needs a metric to tell better from worse."""
    return (
        args.load_best_model_at_end
        or args.save_strategy == SaveStrategy.BEST
        or args.lr_scheduler_type in METRIC_SCHEDULES
    )
