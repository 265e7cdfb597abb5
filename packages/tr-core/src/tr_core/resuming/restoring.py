"""Restore a checkpoint into a run, and fit the run to it: the place of then, the arguments of now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tr_core.adapters import restore_parts
from tr_core.conditions.batch_size_search import lower
from tr_core.resuming.callback_states import CallbackStates
from tr_core.resuming.continuing import apply_settings
from tr_core.saving import checkpoint_parts
from tr_core.steps import steps_left

if TYPE_CHECKING:
    from tr_core.protocols import Restored
    from tr_core.run import Run
    from tr_core.state import TrainerState
    from tr_core.trainer import Trainer

Resume = str | Path | bool | None

# Parts that a run can go on without: other programs save no settings, a run in another precision no loss scale.
_OPTIONAL = ("settings", "scaler")

# What the state holds of the arguments: it is that of now.
_OF_NOW = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps")


def resume_run(trainer: Trainer, run: Run, resume: Resume, fresh: TrainerState) -> bool:
    """Load a checkpoint into everything, and fit run and state to it; False if there is none and none is demanded.

    Args:
        trainer: what is restored.
        run: the call of `train` that begins.
        resume: as of `Trainer.train`, and not None or False.
        fresh: a state as a run that begins has it.

    Raises:
        ValueError: there is none and `resume` is not `auto`, the one named is damaged, or it does not go on with the
            arguments of now; the message says why.
    """
    restored = _restore(trainer, run, resume)
    if restored.step is None:
        return False
    _fit(trainer, run, fresh, restored.states["scheduler"])
    return True


def _restore(trainer: Trainer, run: Run, resume: Resume) -> Restored:
    automatic = resume is True or str(resume) in ("auto", "True", "true")
    source = None if automatic else str(resume)
    # All parts, also with save_only_model: going on without optimizer and place in silence would be another run.
    parts = {**checkpoint_parts(trainer, run), "callbacks": CallbackStates(trainer)}
    # What becomes of the schedule's state depends on what else is restored.
    only_read = ("scheduler",)
    restored = restore_parts(trainer.checkpointer(), parts, source, optional=_OPTIONAL, only_read=only_read)
    if restored.step is not None and "scaler" in parts and "scaler" not in restored.loaded:
        trainer.logger.info("the checkpoint holds no loss scale, as it was saved without fp16: it begins anew")
    if restored.step is None and resume != "auto":
        found = f" (skipped {'; '.join(restored.skipped)})" if restored.skipped else ""
        raise ValueError(
            f"resume_from_checkpoint={resume!r}, but there is no valid checkpoint in {trainer.args.output_dir!r}"
            f"{found}; give the folder of one, or resume_from_checkpoint='auto' to begin anew where there is none"
        )
    return restored


def _fit(trainer: Trainer, run: Run, fresh: TrainerState, schedule_state: dict[str, Any]) -> None:
    args, state = trainer.args, trainer.state
    if args.auto_find_batch_size:
        _take_found_size(trainer, run)
        fresh.train_batch_size = args.train_batch_size
    run.first_step, run.first_tokens = state.global_step, state.num_input_tokens_seen
    for name in _OF_NOW:
        setattr(state, name, getattr(fresh, name))
    apply_settings(trainer, run, schedule_state)
    left = _steps_left(trainer, run)
    if left is not None:
        state.max_steps = state.global_step + left
        run.plan = run.plan.with_max_steps(state.max_steps)
    trainer.logger.info(
        "resuming at step %d of %d: epoch %d, sample %d",
        state.global_step,
        state.max_steps,
        run.position.epoch,
        run.position.samples,
    )


def _steps_left(trainer: Trainer, run: Run) -> int | None:
    """Count the steps to the end of `num_train_epochs`; None where the end is a number of steps."""
    args = trainer.args
    if args.max_steps > 0 or args.ignore_data_skip:
        return None
    return steps_left(args, run.data, run.position.epoch, run.position.samples)


def _take_found_size(trainer: Trainer, run: Run) -> None:
    """Go on with the micro-batch that the saved run found to fit, if steps can be made of such."""
    args, found = trainer.args, trainer.state.train_batch_size
    if found is None or found >= args.train_batch_size:
        return
    if args.train_batch_size * args.gradient_accumulation_steps % found == 0:
        lower(trainer, run, found)
