"""Restore a checkpoint into a run: the saved position, with the current arguments."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, cast

from tr_core.batch_size_search import reduce_batch_size
from tr_core.callback import CallbackList
from tr_core.checkpoint.adapters import restore_parts
from tr_core.checkpoint.changed_arguments import apply_changed_arguments
from tr_core.checkpoint.log_files import FOLDER
from tr_core.checkpoint.saving import OPTIONAL_PARTS, checkpoint_parts, readable_model_parts
from tr_core.plan import epochs_for
from tr_core.protocols import Checkpointer, EvaluationWeights, Restored
from tr_core.run import Run
from tr_core.state import TrainerState
from tr_log import get_logger

logger = get_logger("tr_core.trainer")

Resume = str | Path | bool | None

# Fields of the state that come from the current arguments.
_FROM_ARGUMENTS = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "eval_steps", "save_steps")


def find_checkpoint(
    checkpointer: Checkpointer, output_dir: str, resume: Resume, only_read: Collection[str] = ("trainer_state",)
) -> Restored:
    """Find the checkpoint that a resume takes, and verify it; nothing is loaded, and only these parts are read.

    Raises:
        ValueError: there is none and `resume` is not `auto`, or the named one is damaged.
    """
    checkpointer.restore({}, source=source_of(resume), only_read=only_read)
    return _found(cast("Restored", checkpointer.restored), output_dir, resume)


def resume_run(run: Run, resume: Resume, fresh: TrainerState, loaded: Restored | None = None) -> Path | None:
    """Load a checkpoint into all parts, and fit run and state to it; return its folder, None if `auto` found none.

    Args:
        run: the run.
        resume: the checkpoint.
        fresh: the state of a new run.
        loaded: the checkpoint that the model was loaded from before; None loads the model too.

    Raises:
        ValueError: there is no checkpoint and `resume` is not `auto`, the named one is damaged, or it cannot resume
            with the current arguments. The message says why.
    """
    restored = _restore(run, resume, loaded)
    if restored.step is None:
        return None
    if loaded is not None and restored.step != loaded.step:
        raise ValueError(
            f"resume_from_checkpoint={resume!r} was the checkpoint of step {loaded.step} when the model was loaded, "
            f"and is that of step {restored.step} now: give the folder of one checkpoint"
        )
    sources = [Path(run.methods.args.output_dir).absolute(), Path(restored.source or "").parent]
    run.log_files.read(run.methods.state.log_history, [each / FOLDER for each in sources])
    _fit_to_arguments(run, fresh, restored.states["scheduler"])
    return restored.source


def source_of(resume: Resume) -> str | None:
    """Return what a checkpointer takes; None for the newest of the run's own folder."""
    return None if resume is True or str(resume) in ("auto", "True", "true") else str(resume)


def _restore(run: Run, resume: Resume, loaded: Restored | None) -> Restored:
    methods = run.methods
    args, callbacks, source = methods.args, methods.callback_handler, source_of(resume)
    model = {} if loaded is not None else readable_model_parts(run.strategy, methods.model, methods.model_wrapped)
    if loaded is not None and source is None:
        source = str(loaded.source)
    # All parts, also with save_only_model: without optimizer and position it would silently be another run.
    parts = {
        **checkpoint_parts(run, model),
        "callbacks": CallbackStates(callbacks, restores=args.restore_callback_states_from_checkpoint),
    }
    # The use of the schedule's state depends on the other restored parts.
    only_read = ("scheduler",)
    restored = restore_parts(run.methods.checkpointer(), parts, source, optional=OPTIONAL_PARTS, only_read=only_read)
    if restored.step is not None and "scaler" in parts and "scaler" not in restored.loaded:
        logger.info("the checkpoint holds no loss scale, as it was saved without fp16: it starts over")
    return _found(restored, args.output_dir, resume)


def _found(restored: Restored, output_dir: str, resume: Resume) -> Restored:
    if restored.step is None and resume != "auto":
        found = f" (skipped {'; '.join(restored.skipped)})" if restored.skipped else ""
        raise ValueError(
            f"resume_from_checkpoint={resume!r}, but there is no valid checkpoint in {output_dir!r}"
            f"{found}; give the folder of one, or resume_from_checkpoint='auto' to start over where there is none"
        )
    return restored


def _fit_to_arguments(run: Run, fresh: TrainerState, schedule_state: dict[str, Any]) -> None:
    args, state = run.methods.args, run.methods.state
    found, run.found_size = run.found_size, None
    if args.auto_find_batch_size:
        _adopt_found_size(run, found)
        fresh.train_batch_size = args.train_batch_size
    run.window.first_step, run.window.first_tokens = state.global_step, state.num_input_tokens_seen
    saved_max_steps = state.max_steps
    for name in _FROM_ARGUMENTS:
        setattr(state, name, getattr(fresh, name))
    left = apply_changed_arguments(run, run.settings, schedule_state, saved_max_steps)
    if left is not None:
        state.max_steps = state.global_step + left
        run.plan = run.plan.with_max_steps(state.max_steps)
    elif (steps := state.max_steps - state.global_step) > 0:
        epochs = epochs_for(args, run.data, run.position.epoch, run.position.samples, steps)
        state.num_train_epochs = epochs or state.num_train_epochs
    logger.info(
        "resuming at step %d of %d: epoch %d, sample %d",
        state.global_step,
        state.max_steps,
        run.position.epoch,
        run.position.samples,
    )


def _adopt_found_size(run: Run, found: int | None) -> None:
    """Use the micro-batch size that the saved run found to fit, if it divides the current step."""
    args = run.methods.args
    if found is None or args.train_batch_size * args.gradient_accumulation_steps % found:
        return
    if found < args.train_batch_size:
        reduce_batch_size(run, found)
    if found == args.train_batch_size:
        run.found_size = found


class CallbackStates:
    """Restore the states of a Trainer's callbacks; a warning names the states that do not fit.

    With `restore_callback_states_from_checkpoint=False` callbacks start fresh, except those that hold weights.
    """

    def __init__(self, callbacks: CallbackList, *, restores: bool) -> None:
        self._callbacks, self._restores = callbacks, restores

    def state_dict(self) -> dict[str, Any]:
        """Return the states by the callbacks' names."""
        return self._callbacks.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Load each callback's state, and log callbacks without a state and states without a callback."""
        wanted = self._callbacks.stateful()
        if not self._restores:
            reset = sorted(name for name, callback in wanted.items() if not isinstance(callback, EvaluationWeights))
            if reset:
                logger.info("restore_callback_states_from_checkpoint=False: %s start over", ", ".join(reset))
            state_dict = {name: state for name, state in state_dict.items() if name not in reset}
            wanted = {name: callback for name, callback in wanted.items() if name not in reset}
        if nobody := sorted(set(state_dict) - set(self._callbacks.stateful())):
            logger.warning(
                "the checkpoint holds states of callbacks that this run does not have, and which are skipped: %s",
                ", ".join(nobody),
            )
        if missing := sorted(set(wanted) - set(state_dict)):
            logger.warning("the checkpoint holds no state of these callbacks, which start over: %s", ", ".join(missing))
        self._callbacks.load_state_dict(state_dict)
