"""Begin a resumed run with what is still to come at the step of its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tr_core.loop import end_epoch, log_evaluate_save

if TYPE_CHECKING:
    from tr_core.run import Run
    from tr_core.trainer import Trainer


def is_complete(trainer: Trainer, run: Run) -> bool:
    """Whether a restored run has made all its steps, and the evaluation and the log that are due after the last one.

    A checkpoint of a step is saved before the epoch ends with it, so that a run which dies in the evaluation at the end
    of its last epoch has made its last step, and that evaluation is still to come.
    """
    if run.first_step < run.plan.max_steps:
        return False
    is_due = _evaluates_at_epoch_end(trainer) or _logs_at_epoch_end(trainer, run)
    return not run.owed and not (_is_within_epoch(run) and is_due)


def make_up(trainer: Trainer, run: Run) -> None:
    """Do what is still to come at the step of the checkpoint, so that the run goes on as one that never stopped.

    That is an evaluation which an interruption left out, with the save after it, and the end of an epoch that ends
    before its last sample: with the last step of the run, because an evaluation that is made up says so, or because
    a callback had asked for it. The end of any other epoch comes when the loop finds no sample left.
    """
    control, state, args = trainer.control, trainer.state, trainer.args
    # Left by an earlier call of `train` that an exception ended.
    control.should_log = control.should_evaluate = control.should_save = control.should_epoch_stop = False
    is_at_the_end = state.global_step >= state.max_steps
    is_asked_to_stop = control.should_training_stop  # in `on_train_begin`
    if run.owed:
        control.should_evaluate = args.eval_strategy != "no"
        control.should_save = "save" in run.owed and args.save_strategy != "no"
        control.should_training_stop, run.owed = is_at_the_end, []
        log_evaluate_save(trainer, run)
        is_asked_to_stop = control.should_training_stop
    control.should_training_stop |= is_at_the_end
    if _is_within_epoch(run) and (is_at_the_end or is_asked_to_stop or run.ends_epoch_early):
        end_epoch(trainer, run, moves_on=run.is_pass_complete() or not control.should_training_stop)


def _is_within_epoch(run: Run) -> bool:
    return run.position.samples > 0 and not run.is_at_epoch_end


def _evaluates_at_epoch_end(trainer: Trainer) -> bool:
    args = trainer.args
    return args.eval_strategy == "epoch" and args.eval_delay <= trainer.state.epoch


def _logs_at_epoch_end(trainer: Trainer, run: Run) -> bool:
    return trainer.args.logging_strategy == "epoch" and run.last_logged_step < trainer.state.global_step
