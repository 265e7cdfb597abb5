"""Begin a run, fresh or resumed, and finish it, whether it ends well or with an exception.

A resumed run first does what was due at the step of its checkpoint: an evaluation or a save that an interruption
skipped, and the end of an epoch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, cast

from tr_core.batch_size_search import run_epochs_within_memory
from tr_core.callbacks.evaluation_weights import adopt_evaluation_weights, weight_parts
from tr_core.changes import watching_modules
from tr_core.checkpoint.adapters import restore_parts
from tr_core.checkpoint.restoring import Resume, resume_run
from tr_core.checkpoint.saving import model_parts
from tr_core.checkpoint.settings import Settings
from tr_core.data.limits import training_batches
from tr_core.data.position import DataPosition
from tr_core.loop import end_epoch, log_evaluate_save, run_epochs, save
from tr_core.optim.fused_backward import check_fused_backward, fused_backward
from tr_core.plan import make_plan, resolve_steps
from tr_core.preemption.preemption import make_preemption, preemptible
from tr_core.protocols import Checkpointer
from tr_core.random_state import set_seed
from tr_core.results import TrainOutput, speed_metrics
from tr_core.run import Run
from tr_core.runtime.memory import ReadMemory
from tr_core.state import TrainerState
from tr_core.validation import check_output_dir, check_quantized, lock_output_dir, unlocking_output_dir
from tr_log.streams import usable_streams

if TYPE_CHECKING:
    from tr_core.trainer.trainer import Trainer


def train(trainer: Trainer, resume: Resume, ignore_keys: list[str] | None) -> TrainOutput:
    """Run training from its beginning or from a checkpoint to its end; the closing event fires in any case."""
    # Ranks differ, so that dropout does; weights do not depend on it: a strategy makes them the same.
    seed = trainer.args.seed + trainer.strategy.rank
    set_seed(seed, deterministic=trainer.args.full_determinism, device=trainer.strategy.device)
    trainer.renew_model()
    check_quantized(trainer.model)
    with (
        usable_streams(),
        trainer.training_context(),
        unlocking_output_dir(trainer.current_checkpointer),
        trainer.memory.stage("train") as read_memory,
    ):
        run = _begin(trainer, resume, ignore_keys)
        if is_run_complete(trainer, run):
            return _return_finished(trainer, run)
        _log_run_start(trainer, run)
        with _training_strategy(trainer, run), _stopping_early(trainer, run), _in_training(trainer, run):
            trainer.random_state.reapply()
            trainer.optimizer_mode.switch(trainer.optimizer, "train")
            if trainer.args.eval_on_start and run.window.first_step == 0:
                trainer.evaluate(ignore_keys=ignore_keys)
                run.agree_on_flags()
            run.mode.begin()
            run_pending(trainer, run)
            (run_epochs_within_memory if trainer.args.auto_find_batch_size else run_epochs)(run)
            return _finish(trainer, run, read_memory)


@contextmanager
def _training_strategy(trainer: Trainer, run: Run) -> Iterator[None]:
    """Have an optimizer that consumes gradients in the backward pass take over what the strategy does with them."""
    usual, optimizer = trainer.strategy, run.optimizer
    name = None if trainer.has_given_optimizer else str(trainer.args.optim)
    check_fused_backward(optimizer, usual, name, syncs_each_batch=run.plan.syncs_each_batch)
    with fused_backward(
        usual, optimizer, trainer.model_wrapped, run.plan.max_grad_norm, trainer.logger.info
    ) as strategy:
        trainer.strategy = strategy
        run.use_strategy(strategy)
        try:
            yield
        finally:
            trainer.strategy = usual
            run.use_strategy(usual)


@contextmanager
def _stopping_early(trainer: Trainer, run: Run) -> Iterator[None]:
    run.preemption = make_preemption(trainer, run.strategy, run.position, partial(save, run), run.writes_in_background)

    def note() -> None:
        trainer.has_assignments = True

    with preemptible(run.preemption), nullcontext() if run.strategy.forwards_together else watching_modules(note):
        yield


@contextmanager
def _in_training(trainer: Trainer, run: Run) -> Iterator[None]:
    """Begin and end training with their events; the closing one fires after an exception too, and is given it."""
    trainer.is_in_train, trainer.metric_window = True, run.window.means
    error: BaseException | None = None
    try:
        trainer.fire("on_train_begin")
        yield
    except BaseException as caught:
        error = caught
        if run.preemption is not None:
            run.preemption.settle_after(caught)
        raise
    finally:
        trainer.is_in_train, trainer.metric_window = False, None
        trainer.chosen.end()
        was_asked = trainer.control.should_save  # by a step that the end of the run overtook
        trainer.fire("on_train_end", error=error)
        if trainer.control.should_save and not was_asked:
            trainer.logger.error(
                "should_save was set in on_train_end, when the run is over and saves no checkpoint any more; set it in "
                "on_step_end or on_epoch_end, or call trainer.save_model()"
            )


def _return_finished(trainer: Trainer, run: Run) -> TrainOutput:
    trainer.logger.info(
        "nothing to do: the checkpoint is at step %d of %d, and the run is complete; a larger num_train_epochs or "
        "max_steps goes on with it",
        run.window.first_step,
        run.plan.max_steps,
    )
    _load_final_weights(trainer)
    return TrainOutput(trainer.state.global_step, _last_train_loss(trainer), {})


def _begin(trainer: Trainer, resume: Resume, ignore_keys: list[str] | None) -> Run:
    """Prepare model, optimizer and data, and restore a checkpoint if there is one to restore."""
    args, strategy = trainer.args, trainer.strategy
    trainer.prepare()
    trainer.check_setup()
    if not trainer.has_own_checkpointer:  # one that was given knows its folder
        check_output_dir(args, args.output_dir, strategy)
    if args.save_strategy != "no":
        lock_output_dir(trainer.checkpointer())
    loader = trainer.get_train_dataloader()
    data = training_batches(loader, args, strategy.world_size)
    plan = make_plan(args, data)
    optimizer, schedule = trainer.renew_optimizer(plan.max_steps)
    strategy.bind_optimizer(trainer.model_wrapped, optimizer)
    trainer.state = _fresh_state(trainer, plan.max_steps, plan.num_epochs)
    trainer.loaders["train_dataloader"] = loader
    trainer.model.zero_grad(set_to_none=True)  # of a backward pass by hand, or of a run that failed in the middle
    run = Run.begin(trainer, strategy, plan, data, optimizer, schedule)
    run.ignore_keys = ignore_keys
    run.settings = Settings(run)
    resumed = False
    if resume not in (None, False):
        resumed = resume_run(run, resume, _fresh_state(trainer, plan.max_steps, plan.num_epochs))
    if not resumed and args.save_strategy != "no":
        _warn_of_earlier(trainer, trainer.checkpointer())
    return run


def _warn_of_earlier(trainer: Trainer, checkpointer: Checkpointer) -> None:
    earlier, problem = [], ""
    if trainer.strategy.rank == 0:
        try:
            earlier = checkpointer.steps()
        except ValueError as error:
            problem = str(error)
    if problem := trainer.strategy.gather_objects(problem)[0]:
        raise ValueError(problem)  # the first save would fail at it
    if earlier:
        trainer.logger.warning(
            "%s holds checkpoints of an earlier run, up to step %d: resuming takes those until this run has saved its "
            "first, a save of the same step replaces one, and save_total_limit leaves the others; give every run an "
            "output_dir of its own, or remove them with `trainer ckpt prune`",
            trainer.args.output_dir,
            earlier[-1],
        )


def _fresh_state(trainer: Trainer, max_steps: int, num_epochs: int) -> TrainerState:
    args, strategy = trainer.args, trainer.strategy
    return TrainerState(
        epoch=0.0,
        max_steps=max_steps,
        num_train_epochs=num_epochs,
        logging_steps=resolve_steps(args.logging_steps, max_steps),
        eval_steps=resolve_steps(args.eval_steps, max_steps),
        save_steps=resolve_steps(args.save_steps, max_steps),
        train_batch_size=args.train_batch_size,
        is_local_process_zero=strategy.local_rank == 0,
        is_world_process_zero=strategy.rank == 0,
        **trainer.trial_state(),
    )


def _log_run_start(trainer: Trainer, run: Run) -> None:
    args, logger = trainer.args, trainer.logger
    samples = "unknown" if run.data.num_samples is None else f"{run.data.num_samples:,}"
    logger.info(
        "training %s: %s trainable parameters on %s x %d, %s samples an epoch, %d a device and micro-batch, "
        "%d micro-batches a step, %d samples a step, %d steps",
        type(trainer.model).__name__,
        f"{trainer.get_num_trainable_parameters():,}",
        trainer.strategy.device,
        trainer.strategy.world_size,
        samples,
        args.train_batch_size,
        args.gradient_accumulation_steps,
        run.plan.per_step,
        run.plan.max_steps,
    )


def _finish(trainer: Trainer, run: Run, read_memory: ReadMemory) -> TrainOutput:
    """Log the run's own figures and load the best weights, if that was asked for."""
    state = trainer.state
    steps = state.global_step - run.window.first_step
    if run.preemption is not None:
        run.preemption.settle()
    run.close_window()
    share = steps / max(run.plan.max_steps, 1)
    metrics = speed_metrics("train", run.window.start_s, num_samples=run.plan.num_samples * share, num_steps=steps)
    metrics["total_flos"] = state.total_flos
    metrics["train_loss"] = run.window.mean_loss(steps)
    metrics |= read_memory()
    trainer.log_result(metrics)
    trainer.optimizer_mode.switch(trainer.optimizer, "eval")
    _load_final_weights(trainer)
    if trainer.args.push_to_hub:
        trainer.save_model()  # what is pushed when training ends is this model, not an older file
        trainer.create_model_card()
    return TrainOutput(state.global_step, metrics["train_loss"], metrics)


def _load_final_weights(trainer: Trainer) -> None:
    """Leave the model with the weights that the arguments ask for at the end: of the last or the best step."""
    if trainer.args.load_best_model_at_end:
        _load_best(trainer)
    adopt_evaluation_weights(trainer.callback_handler.callbacks, trainer.model, trainer.state)


def _load_best(trainer: Trainer) -> None:
    state, checkpointer = trainer.state, trainer.checkpointer()
    if state.best_global_step is None:
        # Not raised: the weights of a whole training would go with it.
        trainer.logger.error(
            "load_best_model_at_end=True, but no evaluation of this run gave a %r that is a number; the weights are "
            "those of step %d. Lower eval_steps or eval_delay if no evaluation was made",
            trainer.args.metric_for_best_model,
            state.global_step,
        )
        return
    folder, is_there, problem = trainer.strategy.gather_objects(_find_best_checkpoint(state, checkpointer))[0]
    if problem:
        raise ValueError(f"load_best_model_at_end=True, but the best weights were not loaded: {problem}")
    trainer.lacks_best_weights = not is_there  # as rank 0 sees it
    if trainer.lacks_best_weights:
        trainer.logger.error(
            "load_best_model_at_end=True, but the checkpoint of the best step, %d, is not at %s; the weights are those "
            "of step %d. Where it was kept or pushed, it is loaded from there with from_pretrained",
            state.best_global_step,
            folder,
            state.global_step,
        )
        return
    weights = weight_parts(trainer.callback_handler.callbacks, trainer.model)
    restore_parts(
        checkpointer, {**model_parts(trainer.strategy, trainer.model, trainer.model_wrapped), **weights}, folder
    )
    trainer.logger.info("loaded the best weights: %s, metric %s", folder, state.best_metric)


def _find_best_checkpoint(state: TrainerState, checkpointer: Checkpointer) -> tuple[str, bool, str]:
    """Return where the checkpoint of the best step is, whether it is there, and why that cannot be found out."""
    best = cast("int", state.best_global_step)
    try:
        folder = str(checkpointer.path(best))
        if best in checkpointer.steps():
            return folder, True, ""
        # The run began in another folder, or on another machine and went on from the Hub.
        folder = state.best_model_checkpoint or folder
        return folder, os.path.isdir(folder), ""
    except ValueError as error:
        return "", False, str(error)


def _last_train_loss(trainer: Trainer) -> float:
    entries = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    return entries[-1] if entries else math.nan


def is_run_complete(trainer: Trainer, run: Run) -> bool:
    """Whether a restored run has made all its steps, and the evaluation and the log that are due after the last one.

    A checkpoint of a step is saved before the epoch ends with it, so that a run which dies in the evaluation at the end
    of its last epoch has made its last step, and that evaluation is still to come.
    """
    if run.window.first_step < run.plan.max_steps:
        return False
    is_due = _evaluates_at_epoch_end(trainer) or _logs_at_epoch_end(trainer, run)
    return not run.position.pending and not (_is_within_epoch(run.position) and is_due)


def run_pending(trainer: Trainer, run: Run) -> None:
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
    if run.position.pending:
        control.should_evaluate = args.eval_strategy != "no"
        control.should_save = "save" in run.position.pending and args.save_strategy != "no"
        control.should_training_stop, run.position.pending = is_at_the_end, []
        log_evaluate_save(run)
        is_asked_to_stop = control.should_training_stop
    control.should_training_stop |= is_at_the_end
    if _is_within_epoch(run.position) and (is_at_the_end or is_asked_to_stop or run.position.ends_epoch_early):
        end_epoch(run, moves_on=run.is_epoch_complete() or not control.should_training_stop)


def _is_within_epoch(position: DataPosition) -> bool:
    return position.samples > 0 and not position.is_at_epoch_end


def _evaluates_at_epoch_end(trainer: Trainer) -> bool:
    args = trainer.args
    return args.eval_strategy == "epoch" and args.eval_delay <= trainer.state.epoch


def _logs_at_epoch_end(trainer: Trainer, run: Run) -> bool:
    return trainer.args.logging_strategy == "epoch" and run.window.last_logged_step < trainer.state.global_step
