"""Turn the logging, evaluation and saving strategies of the arguments into flags."""

from __future__ import annotations

from typing import Any

from tr_args import Duration, TrainingArguments
from tr_core.callback import TrainerCallback
from tr_core.state import TrainerControl, TrainerState


class DefaultFlowCallback(TrainerCallback):
    """Request logs, evaluations and checkpoints by their strategies, and end the run at its last step.

    Under the `steps` strategies the last step is evaluated and saved even off the interval. Under a strategy of wall
    time it is also evaluated and saved before it is due. `WallTimeCallback` requests what is due by time. The `best`
    saving strategy is decided elsewhere, when an evaluation's result is known.
    """

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Apply the `steps` strategies and the end of the run."""
        step = state.global_step
        if (step == 1 and args.logging_first_step) or (
            args.logging_strategy == "steps" and step % state.logging_steps == 0
        ):
            control.should_log = True
        if args.eval_strategy == "steps" and args.eval_delay <= step and step % state.eval_steps == 0:
            control.should_evaluate = True
        if args.save_strategy == "steps" and step % state.save_steps == 0:
            control.should_save = True
        if step >= state.max_steps:
            control.should_training_stop = True
            control.should_evaluate |= _acts_at_the_end(args.eval_strategy) and args.eval_delay <= step
            control.should_save |= _acts_at_the_end(args.save_strategy)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Apply the `epoch` strategies."""
        if args.logging_strategy == "epoch":
            control.should_log = True
        if args.eval_strategy == "epoch" and args.eval_delay <= state.epoch:
            control.should_evaluate = True
        if args.save_strategy == "epoch":
            control.should_save = True


def _acts_at_the_end(strategy: str) -> bool:
    return strategy == "steps" or isinstance(strategy, Duration)
