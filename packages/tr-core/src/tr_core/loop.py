"""Train from the first sample to the last step: the loop, in reading order.

A step fetches its micro-batches and runs forward and backward of each. Only the last one synchronises gradients. Then
come clipping, optimizer, schedule and events, and log, evaluation and save, if they are due. Nothing in a step reads a
value back from the device: losses and norms stay there until a log is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any, cast

import torch

from tr_core.data.batches import AskedBatches
from tr_core.data.sampler import MicroBatch
from tr_core.evaluation.best_metric import watched_metric
from tr_core.run import Run
from tr_core.start import log_at_first
from tr_log.phases import CHECKPOINT, EVALUATION, PhaseClock, phase

_ZERO_GRAD = torch.optim.Optimizer.zero_grad


def run_epochs(run: Run) -> None:
    """Train from `run.position` until the plan's last step, or until a callback stops the run."""
    methods, position = run.methods, run.position
    while run.has_epoch_left() and not methods.control.should_training_stop:
        first_sample, first_step = position.samples, methods.state.global_step
        if not run.is_epoch_complete():  # complete after a resume from an epoch's last step
            run.begin_epoch()
            run_due = what_is_due(run)
            for step in iterate_steps(run, position.epoch, first_sample):
                train_step(run, step)
                run_due(run)
                # Compared here: a step without a user's change must cost no call.
                seen = (methods.args.num_assignments, methods.has_assignments, len(run.optimizer.param_groups))
                if seen != run.watch.seen:
                    run.apply_changes()
                if methods.control.should_epoch_stop or methods.control.should_training_stop:
                    break
            if methods.state.global_step == first_step and first_sample == position.samples == 0:
                raise ValueError(_no_batch(position.epoch, first_step, methods.state.max_steps))
        end_epoch(run, moves_on=run.is_epoch_complete() or not methods.control.should_training_stop)
    run.check_length()


def end_epoch(run: Run, *, moves_on: bool) -> None:
    """Run what is due at the end of an epoch. `moves_on`: whether the next sample belongs to the next epoch."""
    run.position.is_at_epoch_end = True
    if moves_on:
        run.position.next_epoch()
    run.fire("on_epoch_end")
    what_is_due(run)(run)


def train_step(run: Run, step: StepData) -> None:
    """Run one optimizer step. Its loss and gradient norm stay on the device."""
    methods, strategy, optimizer, window = run.methods, run.strategy, run.optimizer, run.window
    scope, model, state, fire = methods.scope, methods.model_wrapped, methods.state, methods.callback_handler.fire
    scope.size = step.size if run.shards is None else step.size // len(run.shards.own)
    scope.number = number = 0
    window.begin_step(state.global_step)
    fire("on_step_begin")
    compute = partial(_compute, run, step)
    if run.shards is not None:
        compute = run.shards.seeding(compute, methods.args.seed, state.global_step, step.size, strategy.device)
    inputs_of = partial(methods.inputs_of_schedule, num_items=step.num_items)
    computed = strategy.run_micro_batches(model, step.micro_batches, compute, inputs_of, step.size)
    for number, (batch, loss) in enumerate(computed, start=1):
        window.add(loss, batch)
        scope.inputs, run.position.samples = None, batch.end
        fire("on_micro_batch_end", loss=loss, inputs=batch.inputs, outputs=scope.outputs)
        scope.outputs = None
        if number < step.size:
            fire("on_substep_end")
    if number < step.size:
        raise ValueError(_too_few_batches(step.size - number))
    scope.weight, scope.total, scope.loss = 1.0, None, window.step_loss
    window.grad_norm = norm = run.updates.clip_grad_norm(model, run.plan.max_grad_norm)
    fire("on_pre_optimizer_step")
    applied = run.updates.step()
    fire("on_optimizer_step", applied=applied, left_out=window.left_out)
    window.end_step(norm, optimizer.param_groups[0]["lr"], applied=applied)
    if applied and not run.follows_metric:
        run.schedule.step()
    clear_gradients(optimizer)
    if run.watch.outside:
        run.watch.clear_outside()
    state.global_step += 1
    micro_batches_done = -(-run.position.samples // run.data.samples_per_micro_batch)
    state.epoch = run.position.epoch + micro_batches_done / run.plan.batches_per_epoch
    fire("on_step_end")


def _compute(run: Run, step: StepData, batch: MicroBatch) -> tuple[MicroBatch, torch.Tensor]:
    """Run forward and backward of a micro-batch, and return it with its share of the step's loss."""
    methods, scope = run.methods, run.methods.scope
    scope.number += 1
    scope.weight, scope.total, scope.inputs = batch.weight, batch.total, batch.inputs
    scope.is_last, is_last = scope.number == step.size, scope.number % scope.size == 0
    if not methods.model.training:
        run.mode.restore()
    with run.strategy.accumulate(methods.model_wrapped, sync=run.plan.syncs_each_batch or is_last):
        return batch, methods.step_function(methods.model_wrapped, batch.inputs, step.num_items)


def clear_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Clear the gradients as `zero_grad` does: an optimizer's own, or torch's without its block for the profiler."""
    if type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer):
        optimizer.zero_grad(set_to_none=True)
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def what_is_due(run: Run) -> Callable[[Run], None]:
    """Return what runs what is due after a step: `log_evaluate_save`, or an override."""
    due = run.after_step or log_evaluate_save
    if run.recovery is not None:
        due = run.recovery.after_step(due)
    return due if run.legs is None else run.legs.after_step(due)


def log_evaluate_save(run: Run) -> None:
    """Run what is due, in this order: log, evaluate, record the best, save.

    A request after its turn, as for a log in `on_save`, is due at the end of the next step.
    """
    methods = run.methods
    control = methods.control
    has_news = methods.state.global_step > run.window.last_logged_step
    if control.should_log and has_news:
        run.log_window()
    if control.should_evaluate or control.should_save:
        run.updates.check()
    if control.should_evaluate:
        evaluate(run)
        control.should_evaluate = False  # an override may fire no event that clears it
    if control.should_save:
        save(run)
    control.should_log &= has_news


def evaluate(run: Run) -> None:
    """Evaluate, step a schedule that follows a metric, and record the best."""
    methods = run.methods
    metrics = methods._evaluate(methods.trial, run.ignore_keys)
    is_best = methods._determine_best_metric(metrics=metrics, trial=methods.trial)
    if is_best and (methods.args.save_strategy == "best" or methods.args.load_best_model_at_end):
        methods.control.should_save = True  # load_best_model_at_end needs a checkpoint of the best step


def evaluate_and_report(run: Run, ignore_keys: list[str] | None, *, steps: bool = True) -> dict[str, float]:
    """Evaluate, report to a search, and return the metrics; `steps` a schedule that follows one of them."""
    methods = run.methods
    run.store_tokens()
    run.settle()
    with run.preemption.evaluating(), phase(EVALUATION):
        metrics = methods.evaluate(ignore_keys=ignore_keys)
    methods.report_trial(metrics)
    if steps and run.follows_metric:  # with an evaluation's result, not after every step
        cast("Any", run.schedule).step(watched_metric(methods.args, metrics))
    return metrics


def save(run: Run) -> None:
    """Save a checkpoint, and fire `on_save`."""
    run.settle()
    with phase(CHECKPOINT):
        run.methods.save_checkpoint(run)
    run.fire("on_save")


@dataclass(slots=True)
class StepData:
    """Hold the micro-batches of one optimizer step.

    Attributes:
        micro_batches: one-shot iterator. Loads lazily, unless targets must be counted first or the epoch has no length.
        num_items: targets in all micro-batches of all ranks, a scalar tensor on the device; None if not counted.
    """

    micro_batches: Iterator[MicroBatch]
    size: int
    num_items: torch.Tensor | None


def iterate_steps(run: Run, epoch: int, position: int) -> Iterator[StepData]:
    """Yield the steps of an epoch after `position` samples; the last one takes the remaining samples.

    Micro-batches are loaded as they are used. If targets are counted, or if the length of the epoch is unknown, all
    micro-batches of a step are loaded first, to the host only; where an override takes them, to the device.
    """
    accumulation, take = run.plan.accumulation, run.take_batches
    batches = _timed(log_at_first(run.data.iterate(epoch, position)), run.window.clock)
    asked = AskedBatches(batches, run.strategy.device)
    remaining, shards = run.data.remaining(position), 1 if run.shards is None else len(run.shards.own)
    while remaining is None or remaining > 0:
        size = shards * (accumulation if remaining is None else min(accumulation, remaining))
        loaded, num_items, count_targets = None, None, run.count_targets
        if take is not None:  # an override takes the batches
            loaded, num_items = take(asked, size)
        elif remaining is None or count_targets is not None:
            loaded = list(islice(batches, size))
        if remaining is None:
            if not loaded:
                return
            size = len(loaded)
        if take is None and count_targets is not None and loaded is not None:
            num_items = count_targets(loaded)
        if run.recovery is not None and run.recovery.leaves_out_step():
            for batch in islice(batches, size) if loaded is None else loaded:
                run.position.samples = batch.end
        else:
            yield StepData(islice(batches, size) if loaded is None else iter(loaded), size, num_items)
        if remaining is not None:
            remaining -= size // shards


def _timed(batches: Iterator[MicroBatch], clock: PhaseClock) -> Iterator[MicroBatch]:
    """Yield micro-batches, and count how long they are waited for."""
    since_s = perf_counter()
    for batch in batches:
        clock.waited_s += perf_counter() - since_s
        yield batch
        since_s = perf_counter()


def _no_batch(epoch: int, step: int, max_steps: int) -> str:
    return (
        f"epoch {epoch} of the training data gave no batch, at step {step} of {max_steps}; data that is read again "
        "must begin again, which a generator cannot: give an object with __iter__, and one that is not empty"
    )


def _too_few_batches(missing: int) -> str:
    return (
        f"the training data loader ended {missing} batches before its length; a loader's __len__ must be the number "
        "of batches it gives, or raise TypeError where that is unknown"
    )
