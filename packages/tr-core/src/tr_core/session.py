"""Begin a run, resumed or fresh, and end it, whichever way it ends."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch

from tr_core.adapters import restore_parts
from tr_core.callbacks.interruption import interruptible
from tr_core.changes import watching_modules
from tr_core.checks import check_quantized, check_setup
from tr_core.conditions.batch_size_search import run_epochs_within_memory
from tr_core.conditions.memory_metrics import ReadMemory
from tr_core.conditions.output_folder import check_that_it_can_be_written_to, claim, releasing
from tr_core.conditions.surroundings import while_training
from tr_core.data.first_batches import training_batches
from tr_core.evaluation.evaluation_weights import keep_evaluation_weights, switch_optimizer, weight_parts
from tr_core.loop import run_epochs
from tr_core.making_up import is_complete, make_up
from tr_core.optimization.in_backward import consuming_gradients
from tr_core.protocols import Checkpointer
from tr_core.randomness import set_seed
from tr_core.results import TrainOutput
from tr_core.resuming.restoring import Resume, resume_run
from tr_core.resuming.settings import Settings
from tr_core.run import Run
from tr_core.saving import model_parts
from tr_core.speed import speed_metrics
from tr_core.state import TrainerState
from tr_core.steps import make_plan, resolve_steps
from tr_core.training_mode import TrainingMode
from tr_core.window import close_window
from tr_log.streams import usable_streams

if TYPE_CHECKING:
    from tr_core.trainer import Trainer


def train(trainer: Trainer, resume: Resume, ignore_keys: list[str] | None) -> TrainOutput:
    """Run training from its beginning or from a checkpoint to its end; the closing event fires in any case."""
    # Ranks differ, so that dropout does; weights do not depend on it: a strategy makes them the same.
    seed = trainer.args.seed + trainer.strategy.rank
    set_seed(seed, deterministic=trainer.args.full_determinism, device=trainer.strategy.device)
    trainer.renew_model()
    check_quantized(trainer.model)
    with usable_streams(), while_training(trainer), releasing(trainer), trainer.memory.stage("train") as read_memory:
        run = _begin(trainer, resume, ignore_keys)
        if is_complete(trainer, run):
            return _leave_finished(trainer, run)
        _announce(trainer, run)
        around = (consuming_gradients(trainer, run), interruptible(trainer, run), watching_modules(trainer))
        with around[0], around[1], around[2], _in_training(trainer, run):
            trainer.random_state.reapply()
            switch_optimizer(trainer, "train")
            if trainer.args.eval_on_start and run.first_step == 0:
                trainer.evaluate(ignore_keys=ignore_keys)
                run.agree_on_flags()
            run.mode.begin()
            make_up(trainer, run)
            (run_epochs_within_memory if trainer.args.auto_find_batch_size else run_epochs)(trainer, run)
            return _finish(trainer, run, read_memory)


@contextmanager
def _in_training(trainer: Trainer, run: Run) -> Iterator[None]:
    """Begin and end training with their events; the closing one fires after an exception too, and is given it."""
    trainer.is_in_train, trainer.metric_window = True, run.metrics
    error: BaseException | None = None
    try:
        trainer.fire("on_train_begin")
        yield
    except BaseException as caught:
        error = caught
        run.settle_after(caught)
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


def _leave_finished(trainer: Trainer, run: Run) -> TrainOutput:
    trainer.logger.info(
        "nothing to do: the checkpoint is at step %d of %d, and the run is complete; a larger num_train_epochs or "
        "max_steps goes on with it",
        run.first_step,
        run.plan.max_steps,
    )
    _settle_weights(trainer)
    return TrainOutput(trainer.state.global_step, _last_train_loss(trainer), {})


def _begin(trainer: Trainer, resume: Resume, ignore_keys: list[str] | None) -> Run:
    """Prepare model, optimizer and data, and restore a checkpoint if there is one to restore."""
    args, strategy = trainer.args, trainer.strategy
    trainer.prepare()
    check_setup(trainer)
    check_that_it_can_be_written_to(trainer)
    claim(trainer)
    loader = trainer.get_train_dataloader()
    data = training_batches(loader, args, strategy.world_size)
    plan = make_plan(args, data)
    optimizer, schedule = trainer.renew_optimizer(plan.max_steps)
    if (bind := getattr(strategy, "bind_optimizer", None)) is not None:
        bind(trainer.model_wrapped, optimizer)
    trainer.state = _fresh_state(trainer, plan.max_steps, plan.num_epochs)
    trainer.loaders["train_dataloader"] = loader
    loss_sum = torch.zeros((), device=strategy.device)
    mode = TrainingMode(trainer.model, trainer.model_wrapped)
    trainer.model.zero_grad(set_to_none=True)  # of a backward pass by hand, or of a run that failed in the middle
    run = Run(plan, data, strategy, optimizer, schedule, loss_sum, mode, ignore_keys=ignore_keys)
    run.configure(trainer)
    run.settings = Settings(trainer, run)
    resumed = False
    if resume not in (None, False):
        resumed = resume_run(trainer, run, resume, _fresh_state(trainer, plan.max_steps, plan.num_epochs))
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


def _announce(trainer: Trainer, run: Run) -> None:
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
    steps = state.global_step - run.first_step
    run.settle()
    close_window(trainer, run)
    share = steps / max(run.plan.max_steps, 1)
    metrics = speed_metrics("train", run.start_s, num_samples=run.plan.num_samples * share, num_steps=steps)
    metrics["total_flos"] = state.total_flos
    metrics["train_loss"] = run.mean_loss(steps)
    metrics |= read_memory()
    trainer.log_result(metrics)
    switch_optimizer(trainer, "eval")
    _settle_weights(trainer)
    if trainer.args.push_to_hub:
        trainer.save_model()  # what is pushed when training ends is this model, not an older file
        trainer.create_model_card()
    return TrainOutput(state.global_step, metrics["train_loss"], metrics)


def _settle_weights(trainer: Trainer) -> None:
    """Leave the model with the weights that the arguments ask for at the end: of the last or the best step."""
    if trainer.args.load_best_model_at_end:
        _load_best(trainer)
    keep_evaluation_weights(trainer)


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
    folder, is_there, problem = trainer.strategy.gather_objects(_place_of_best(state, checkpointer))[0]
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
    restore_parts(checkpointer, {**model_parts(trainer), **weight_parts(trainer)}, folder)
    trainer.logger.info("loaded the best weights: %s, metric %s", folder, state.best_metric)


def _place_of_best(state: TrainerState, checkpointer: Checkpointer) -> tuple[str, bool, str]:
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
