"""Begin a resumed run with what the step before it still owes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tr_core.loop import log_evaluate_save

if TYPE_CHECKING:
    from tr_core.run import Run
    from tr_core.trainer import Trainer


def make_up(trainer: Trainer, run: Run) -> None:
    """Evaluate, and save after it, where an interruption left the evaluation of its step out.

    The result may end the run, as it would have at that step.
    """
    if not run.owed:
        return
    control, state = trainer.control, trainer.state
    control.should_log, control.should_evaluate = False, trainer.args.eval_strategy != "no"
    control.should_save = "save" in run.owed and trainer.args.save_strategy != "no"
    control.should_training_stop = state.global_step >= state.max_steps
    run.owed = []
    log_evaluate_save(trainer, run)
    if control.should_training_stop and run.position.samples > 0:  # in the middle of a pass, whose end is to come
        if run.is_pass_complete():
            run.position.epoch, run.position.samples = run.position.epoch + 1, 0
        trainer.fire("on_epoch_end")
        log_evaluate_save(trainer, run)
