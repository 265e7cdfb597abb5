"""Train: the loop, from the first sample to the last step, to be read from top to bottom.

A step is: fetch its micro-batches; forward and backward of each, gradients synchronised with the last one only; clip;
optimizer; schedule; events; then log, evaluate and save, if they are due. Nothing in a step reads a value back from
the device: losses and norms stay there until a log is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, cast

from tr_core.changes import apply_changes, check_length
from tr_core.data.sampler import MicroBatch
from tr_core.evaluation.best_metric import record_best, watched_metric
from tr_core.log_window import log_window, store_tokens
from tr_core.run import CHECK_EVERY, Run

if TYPE_CHECKING:
    import torch
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    from tr_core.trainer.trainer import Trainer


def run_epochs(trainer: Trainer, run: Run) -> None:
    """Train from `run.position` until the plan's last step, or until a callback stops the run."""
    accumulation = trainer.args.gradient_accumulation_steps
    while run.position.epoch < run.plan.num_epochs and not trainer.control.should_training_stop:
        epoch, first_sample, first_step = run.position.epoch, run.position.samples, trainer.state.global_step
        if not run.is_pass_complete():  # it is where a run resumes from a checkpoint of a pass's last step
            begin_epoch(trainer, run)
            for step in iterate_steps(run, epoch, first_sample, accumulation):
                train_step(trainer, run, step, epoch)
                log_evaluate_save(trainer, run)
                # Compared here, for a step in which a user changed nothing is to cost no call.
                seen = (trainer.args.num_assignments, trainer.has_assignments, len(run.optimizer.param_groups))
                if seen != run.seen:
                    apply_changes(trainer, run)
                if trainer.control.should_epoch_stop or trainer.control.should_training_stop:
                    break
            _check_batches(trainer, epoch, first_sample, first_step)
        end_epoch(trainer, run, moves_on=run.is_pass_complete() or not trainer.control.should_training_stop)
    check_length(trainer, run)


def begin_epoch(trainer: Trainer, run: Run) -> None:
    """Do what is due at the beginning of an epoch, or where a run goes on in its middle."""
    if not run.position.is_retry:
        trainer.fire("on_epoch_begin")
    run.position.is_retry = run.position.is_at_epoch_end = False
    run.mode.note()
    apply_changes(trainer, run)


def end_epoch(trainer: Trainer, run: Run, *, moves_on: bool) -> None:
    """Do what is due at the end of an epoch; `moves_on` says whether the next sample is of the next epoch."""
    run.position.is_at_epoch_end = True
    if moves_on:
        run.position.epoch, run.position.samples = run.position.epoch + 1, 0
    trainer.fire("on_epoch_end")
    log_evaluate_save(trainer, run)


def train_step(trainer: Trainer, run: Run, step: StepData, epoch: int) -> None:
    """Make one optimizer step; its loss and gradient norm stay on the device."""
    strategy, model, inner, optimizer = trainer.strategy, trainer.model_wrapped, trainer.model, run.optimizer
    fire, state, number = trainer.callback_handler.fire, trainer.state, 0
    loss_sum, step_loss = run.loss_sum, run.zero
    trainer.scope.size = step.size
    fire("on_step_begin")
    for number, batch in enumerate(step.micro_batches, start=1):
        trainer.scope.weight = batch.weight
        if not inner.training:
            run.mode.restore()
        with strategy.accumulate(model, sync=run.syncs_each_batch or number == step.size):
            loss = trainer.step_function(model, batch.inputs, step.num_items)
        step_loss = step_loss + loss
        shown = run.finite(loss, loss_sum, state.global_step) if run.hides_nan else loss
        loss_sum = (loss_sum + shown).to(loss_sum.dtype)  # not in place: a step may be made again, or left out
        run.position.samples = batch.end
        for count in run.counters:
            count(batch)
        fire("on_micro_batch_end", loss=loss, inputs=batch.inputs, outputs=trainer.scope.outputs)
        trainer.scope.outputs = None
        if number < step.size:
            fire("on_substep_end")
    if number < step.size:
        raise ValueError(_too_few_batches(step.size - number))
    trainer.scope.weight, trainer.scope.loss = 1.0, step_loss
    run.grad_norm = norm = run.update_strategy.clip_grad_norm(model, optimizer, run.max_grad_norm)
    fire("on_pre_optimizer_step")
    run.loss_before_step, run.loss_sum = run.loss_sum, loss_sum
    applied = run.update_strategy.step(optimizer)
    fire("on_optimizer_step", applied=applied)
    run.learning_rate = optimizer.param_groups[0]["lr"]
    if applied:
        run.step_schedule()
        run.unjudged.append((step_loss, norm))
    optimizer.zero_grad(set_to_none=True)
    if run.outside:
        run.clear_outside()
    state.global_step += 1
    micro_batches_done = -(-run.position.samples // run.data.per_micro_batch)
    state.epoch = epoch + micro_batches_done / run.plan.batches_per_epoch
    fire("on_step_end")


def log_evaluate_save(trainer: Trainer, run: Run) -> None:
    """Do what is due, in this order: log, evaluate, note the best, save.

    What is asked for after its turn, as a log in `on_save`, is due at the end of the next step.
    """
    control = trainer.control
    if len(run.unjudged) >= CHECK_EVERY:
        run.count_nonfinite()
    has_news = trainer.state.global_step > run.last_logged_step
    if control.should_log and has_news:
        log_window(trainer, run)
    if run.guard is not None and (control.should_evaluate or control.should_save):
        run.guard.check()
    if control.should_evaluate:
        evaluate(trainer, run)
        control.should_evaluate = False  # also where an override fires no event, which would clear it
    if control.should_save:
        trainer.save_checkpoint(run)
        trainer.fire("on_save")
    control.should_log &= has_news


def evaluate(trainer: Trainer, run: Run) -> None:
    """Evaluate, and have the best noted and the schedule stepped that goes by it."""
    store_tokens(trainer, run)
    with run.evaluating():
        metrics = trainer.evaluate(ignore_keys=run.ignore_keys)
    trainer.report_trial(metrics)
    is_best = record_best(trainer.args, trainer.state, metrics)
    if run.schedule_follows_metric:
        cast("ReduceLROnPlateau", run.schedule).step(watched_metric(trainer.args, metrics))
    if is_best and (trainer.args.save_strategy == "best" or trainer.args.load_best_model_at_end):
        trainer.control.should_save = True  # with the latter because between two checkpoints there is nothing to load


@dataclass(slots=True)
class StepData:
    """The micro-batches of one optimizer step.

    Attributes:
        micro_batches: they, to be iterated once; loaded one at a time where nothing must be known of all beforehand.
        size: how many they are.
        num_items: targets in all of them over all ranks, a scalar tensor on the device; None if not counted.
    """

    micro_batches: Iterator[MicroBatch]
    size: int
    num_items: torch.Tensor | None


def iterate_steps(run: Run, epoch: int, position: int, accumulation: int) -> Iterator[StepData]:
    """Yield the steps of a pass after `position` samples; the last one takes what is left.

    Micro-batches are loaded as they are used. Only where targets are counted, or where the length of the pass is
    unknown, are all of a step loaded first, and then to the host only.
    """
    batches = run.data.iterate(epoch, position)
    remaining = run.data.remaining(position)
    while remaining is None or remaining > 0:
        size = accumulation if remaining is None else min(accumulation, remaining)
        batches_of_step: Iterator[MicroBatch] = islice(batches, size)
        num_items, count_items = None, run.count_items
        if remaining is None or count_items is not None:
            loaded = list(batches_of_step)
            if not loaded and remaining is None:
                return
            batches_of_step = iter(loaded)
            size = len(loaded) if remaining is None else size
            num_items = count_items(loaded) if count_items else None
        yield StepData(batches_of_step, size, num_items)
        if remaining is not None:
            remaining -= size


def _check_batches(trainer: Trainer, epoch: int, first_sample: int, first_step: int) -> None:
    if trainer.state.global_step == first_step and first_sample == 0:
        raise ValueError(
            f"epoch {epoch} of the training data gave no batch, at step {trainer.state.global_step} of "
            f"{trainer.state.max_steps}; data that is read again must begin again, which a generator cannot: give an "
            "object with __iter__, and one that is not empty"
        )


def _too_few_batches(missing: int) -> str:
    return (
        f"the training data loader ended {missing} batches before its length; a loader's __len__ must be the number "
        "of batches it gives, or raise TypeError where that is unknown"
    )
